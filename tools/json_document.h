// SPDX-License-Identifier: Apache-2.0
// What every command prints with --json: one object, which begins with the schema that it keeps.
#pragma once

#include <string_view>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "winnow/winnow.h"

namespace winnow::tools {

/// Goes up when a member is taken away or means something else; docs/tool.md lists the members. New
/// ones may come without.
inline constexpr int kJsonSchema = 1;

inline nlohmann::ordered_json json_document(std::string_view command,
                                            const nlohmann::ordered_json& members) {
  nlohmann::ordered_json all{{"schema", kJsonSchema}, {"command", command}, {"version", version()}};
  all.update(members);
  return all;
}

/// Numbers that are not finite become null; bytes that are not UTF-8, of names of files, are
/// replaced.
inline std::string json_text(std::string_view command, const nlohmann::ordered_json& members) {
  return json_document(command, members)
             .dump(2, ' ', false, nlohmann::json::error_handler_t::replace) +
         '\n';
}

inline void print_json(std::string_view command, const nlohmann::ordered_json& members) {
  fmt::print("{}", json_text(command, members));
}

}  // namespace winnow::tools
