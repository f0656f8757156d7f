// SPDX-License-Identifier: Apache-2.0
// check: an op on a backend, held against the double-precision reference on the same rounded
// inputs.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "harness/cases.h"
#include "harness/compare.h"
#include "winnow/execution.h"

namespace winnow::harness {

/// Runs the op forward and backward on the backend of `execution` and compares everything that it
/// writes. What the backend or the case does not have comes back as a skipped report, an error of
/// the library as a failed one. Throws std::invalid_argument for an op that is none.
std::vector<Report> check(std::string_view op, const Case& c, const Execution& execution,
                          std::uint64_t seed);

/// True if no report failed.
bool all_ok(const std::vector<Report>& reports);

}  // namespace winnow::harness
