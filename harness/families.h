// SPDX-License-Identifier: Apache-2.0
// The families of operators: sparse_attention stands for its forward and its backward operator. One
// table lists them, by which the tool's words, the checks, the benchmarks and the tests go.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "harness/calls.h"
#include "harness/cases.h"
#include "harness/compare.h"
#include "winnow/execution.h"

namespace winnow::harness {

// `op` is the name of a family; for one that is none all but kernels_of throw
// std::invalid_argument that lists the names.

/// The names of all families.
const std::vector<std::string_view>& ops();

/// Why the case has no such op; empty if it has.
std::string missing(std::string_view op, const Case& c);

/// The kernels that the operators of a family have on a backend, best first.
std::vector<std::string_view> kernels_of(std::string_view op, Backend backend);

/// The calls of the family on a case that has it.
Calls calls_of(std::string_view op, const Case& c, Device device, std::uint64_t seed);

/// Runs the op forward and backward on the backend of `execution` and compares everything that it
/// writes. A kernel that the execution names runs the operators that have one of that name. What
/// backend, kernel or case do not have comes back as a skipped report, an error of the library as a
/// failed one.
std::vector<Report> check(std::string_view op, const Case& c, const Execution& execution,
                          std::uint64_t seed);

}  // namespace winnow::harness
