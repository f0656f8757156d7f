// SPDX-License-Identifier: Apache-2.0
// Where a producer or a consumer is in a ring of buffers.
#pragma once

namespace winnow::hopper {

/// The stage that is next, and the phase of its barriers: how often that stage was used before. A
/// consumer waits for phase `phase` of `full`, a producer for phase `phase - 1` of `free`.
template <int kStages>
struct PipelineState {
  int stage = 0;
  int phase = 0;

  __device__ void next() {
    if (++stage == kStages) {
      stage = 0;
      ++phase;
    }
  }
};

}  // namespace winnow::hopper
