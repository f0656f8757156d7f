// SPDX-License-Identifier: Apache-2.0
// check: the checks by the name of their op.
#include "harness/checks.h"

#include <algorithm>
#include <stdexcept>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "harness/trial.h"
#include "harness/workloads.h"

namespace winnow::harness {
namespace {

struct Check {
  std::string_view op;
  std::vector<Report> (*run)(const Case&, const Execution&, std::uint64_t);
};

constexpr Check kChecks[] = {
    {"key_windows", check_key_windows},
    {"window_indices", check_window_indices},
    {"index_topk", check_index_topk},
    {"sparse_attention", check_sparse_attention},
    {"value_projection", check_value_projection},
    {"index_target", check_index_target},
    {"index_loss", check_index_loss},
    {"dense_index_loss", check_dense_index_loss},
    {"quantize_fp8", check_quantize_fp8},
};

}  // namespace

std::vector<Report> check(std::string_view op, const Case& c, const Execution& execution,
                          std::uint64_t seed) {
  const auto* found = std::find_if(std::begin(kChecks), std::end(kChecks),
                                   [&](const Check& each) { return each.op == op; });
  if (found == std::end(kChecks))
    throw std::invalid_argument(
        fmt::format("no op {}: the ops are {}", op, fmt::join(ops(), ", ")));
  Report report;
  report.what = std::string(op);
  report.note = missing(op, c);
  if (!report.note.empty()) {
    report.skipped = true;
    return {report};
  }
  try {
    return found->run(c, execution, seed);
  } catch (const Error& error) {
    report.ok = false;
    report.note = error.what();
    return {report};
  }
}

bool all_ok(const std::vector<Report>& reports) {
  return std::all_of(reports.begin(), reports.end(),
                     [](const Report& report) { return report.ok; });
}

}  // namespace winnow::harness
