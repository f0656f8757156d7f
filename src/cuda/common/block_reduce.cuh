// SPDX-License-Identifier: Apache-2.0
// A reduction over all threads of a block, always in the same order.
#pragma once

namespace winnow::cuda {

/// Combines the values of all kThreads threads; every thread gets the result. It contains two
/// barriers of the block; `storage` may be reused after it.
template <int kThreads, class T, class Combine>
__device__ T reduce_block(T value, T (&storage)[kThreads / 32], Combine combine) {
  constexpr unsigned kAllLanes = 0xffffffffu;
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    value = combine(value, __shfl_xor_sync(kAllLanes, value, step));
  }
  if (threadIdx.x % 32 == 0) storage[threadIdx.x / 32] = value;
  __syncthreads();
  value = storage[0];
#pragma unroll
  for (int warp = 1; warp < kThreads / 32; ++warp) value = combine(value, storage[warp]);
  __syncthreads();  // storage is free again
  return value;
}

}  // namespace winnow::cuda
