// SPDX-License-Identifier: Apache-2.0
// Two warpgroups that take turns at the tensor cores: while one sums, the other multiplies.
#pragma once

#include "cuda/hopper/barrier.cuh"

namespace winnow::hopper {

/// A side waits at its own named barrier, 1 or 2; the other side arrives there when all of its
/// products are issued. Side 1 hands over first, side 0 acquires last.
__device__ inline void acquire_tensor_cores(int side) {
  if (side == 0) {
    sync_warps<1, 256>();
  } else {
    sync_warps<2, 256>();
  }
}
__device__ inline void hand_over_tensor_cores(int to_side) {
  if (to_side == 0) {
    arrive_warps<1, 256>();
  } else {
    arrive_warps<2, 256>();
  }
}

}  // namespace winnow::hopper
