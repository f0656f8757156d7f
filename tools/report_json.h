// SPDX-License-Identifier: Apache-2.0
// A harness report as JSON.
#pragma once

#include <nlohmann/json.hpp>

#include "harness/compare.h"

namespace winnow::tools {

/// Numbers that are not finite become null.
inline nlohmann::ordered_json json_of(const harness::Report& report) {
  nlohmann::ordered_json json{{"what", report.what},
                              {"result", report.skipped ? "skipped"
                                         : report.ok    ? "ok"
                                                        : "failed"}};
  if (!report.skipped) {
    json["max"] = report.max;
    json["rms"] = report.rms;
    json["limit"] = report.limit;
  }
  if (!report.kernel.empty()) json["kernel"] = report.kernel;
  if (!report.note.empty()) json["note"] = report.note;
  return json;
}

}  // namespace winnow::tools
