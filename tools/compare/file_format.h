// SPDX-License-Identifier: Apache-2.0
// The names, shapes and options that a dumped call of each operator has in its file.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "winnow/operators.h"

namespace winnow::dump {

/// Under __metadata__, beside options and outputs that are stated: what is read, and what is not.
inline constexpr std::string_view kOperatorKey = "winnow_operator";
inline constexpr std::string_view kRanOnKey = "winnow_ran_on";
inline constexpr std::string_view kOtherKeys[] = {"winnow_version", "torch_version", "device",
                                                  "format", "comment"};

enum class OptionKind { none, whole_number, number, truth, word };

struct FormatField {
  std::string_view name;
  FieldRole role;
  std::vector<std::string_view> dimensions;  // of a tensor, outermost first
  OptionKind option = OptionKind::none;      // of an option
  std::vector<std::string_view> words;       // of an option that is a word
};

/// The fields of an operator's argument struct, in its order; empty if there is no such operator.
std::vector<FormatField> format_of(std::string_view op);
std::vector<std::string_view> operator_names();

/// Whether each query row has rows of its own in this tensor; others are of keys or heads, and an
/// output without query rows is a sum over them.
bool has_query_rows(const FormatField& field);

}  // namespace winnow::dump
