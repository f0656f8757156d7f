// SPDX-License-Identifier: Apache-2.0
// What a producer tells the warps that consume a stage, one word at a time.
#pragma once

namespace winnow::hopper {

/// Gives all lanes a word of shared memory. Only lane 0 reads it: once that lane frees the stage,
/// which it does for the whole warp, the producer overwrites the word. `lane`: the calling one.
template <class Word>
__device__ Word from_lane_0(int lane, const Word& word) {
  return __shfl_sync(0xffffffffu, lane == 0 ? word : 0, 0);
}

}  // namespace winnow::hopper
