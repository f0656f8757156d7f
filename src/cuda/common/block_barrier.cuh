// SPDX-License-Identifier: Apache-2.0
// A barrier of a thread block whose warps run different code.
#pragma once

namespace winnow::cuda {

/// Waits for all kThreads threads of the block, wherever in the code each warp waits; __syncthreads
/// may not stand in code that only some of them run, and synccheck reports bar.sync there. All
/// warps wait equally often.
template <int kThreads>
__device__ inline void wait_for_block() {
  asm volatile("barrier.sync 0, %0;" ::"n"(kThreads) : "memory");
}

}  // namespace winnow::cuda
