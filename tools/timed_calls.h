// SPDX-License-Identifier: Apache-2.0
// benchmark: the median times of the calls of one op, at a size that the backend can bear.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "harness/cases.h"
#include "tools/progress.h"
#include "tools/timing.h"
#include "winnow/execution.h"

namespace winnow::tools {

enum class Direction { both, forward, backward };

struct Plan {
  std::string_view op;
  harness::Case c;
  bool choose_tokens = true;  // as many of the case's as fit the time
  bool scaling = false;       // every call on one thread too
  Direction direction = Direction::both;
  int repeats = 5;
  std::uint64_t seed = 1;
};

struct Measured {
  std::string call;
  std::string kernel;  // that ran
  harness::Case c;     // as measured
  Timing timing;
  std::optional<Timing> one_thread;
  double flops = 0;  // 0: bound by memory
  std::size_t workspace_bytes = 0;
  std::string why_not;  // not empty: the backend cannot run it
};

/// Threads of the CPU that a call uses.
int thread_count(const Execution& execution);

/// Takes about a quarter of a minute where tokens may be chosen.
std::vector<Measured> benchmark(const Plan& plan, const Execution& execution, Progress& progress);

}  // namespace winnow::tools
