// SPDX-License-Identifier: Apache-2.0
// Judge: holds outputs of a dumped call against the reference in double.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "harness/compare.h"
#include "tools/compare/placed_call.h"

namespace winnow::dump {

/// An element that is not what the reference has.
struct Difference {
  std::vector<std::pair<std::string_view, std::int64_t>> at;  // {"row", 3}, {"head", 1}, ...
  double value = 0;
  double expected = 0;
};

/// What was found out about one output.
struct Finding {
  harness::Report report;
  std::optional<Difference> most;   // the largest difference, in units of the report
  std::optional<Difference> first;  // that is beyond the limit
};

/// Judges the outputs that are there; others are left out.
using Judge = std::function<std::vector<Finding>(const Outputs&)>;

/// Whether the operator gives integers, or numbers that are defined to the last bit.
bool is_exact(std::string_view op);

/// The limits are those of `winnow check`. Runs the reference on these rows (empty: all); throws
/// Error for a call that no backend accepts. The call must outlive the judge.
Judge judge_of(const DumpedCall& call, const harness::Rows& rows);

}  // namespace winnow::dump
