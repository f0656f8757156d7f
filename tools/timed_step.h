// SPDX-License-Identifier: Apache-2.0
// run_step: one training step, call by call, with its times, its memory and its errors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "harness/cases.h"
#include "harness/compare.h"
#include "winnow/execution.h"

namespace winnow::tools {

struct Stage {
  std::string call;
  std::string kernel;  // that ran
  double seconds = 0;
  double flops = 0;  // 0: bound by memory
  std::size_t workspace_bytes = 0;
};

/// What stands in memory beside inputs and outputs of the layer, and what a dense layer would have.
struct MemoryUse {
  std::string what;
  double bytes = 0;
  std::string instead_of;
  double dense_bytes = 0;
};

struct StepResult {
  std::vector<Stage> stages;
  std::vector<MemoryUse> memory;
  double mean_loss = 0;
  std::vector<harness::Report> reports;
  std::size_t compared_rows = 0;
  std::size_t compared_keys = 0;

  std::size_t failed() const;
};

/// With a progress bar. The case is one of a model's geometry, its backend usable here.
StepResult run_step(const harness::Case& c, const Execution& execution, std::uint64_t seed);

}  // namespace winnow::tools
