// SPDX-License-Identifier: Apache-2.0
// The bits that a run leaves in the outputs of a call, and back to what they held before.
#pragma once

#include <vector>

#include "tests/call_maker.h"

namespace winnow::tests {

using Bits = std::vector<Ints>;

inline bool is_written(const Argument& argument) { return argument.is_output && *argument.tensor; }

/// The memory of all outputs.
inline Bits output_bits(const Call& call) {
  Bits bits;
  for (const Argument& argument : call.arguments)
    if (is_written(argument)) bits.push_back(argument.memory.download_ints());
  return bits;
}

/// Checks what stands around the outputs and gives them the bits that they had, since some runs add
/// to those.
inline void restore_outputs(Call& call, const Bits& before) {
  auto saved = before.begin();
  for (Argument& argument : call.arguments) {
    if (!is_written(argument)) continue;
    EXPECT_TRUE(argument.memory.canaries_intact()) << argument.name;
    argument.memory.upload(*saved++);
  }
}

/// What a run leaves in the outputs, which are restored.
inline Bits bits_of_run(Call& call, const Execution& execution) {
  const Bits before = output_bits(call);
  call.run(execution);
  Bits after = output_bits(call);
  restore_outputs(call, before);
  return after;
}

}  // namespace winnow::tests
