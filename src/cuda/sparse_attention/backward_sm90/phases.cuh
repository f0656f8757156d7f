// SPDX-License-Identifier: Apache-2.0
// How far the thread blocks are through their items at the same time. Where keys and their
// gradients fit into L2, blocks had better be at different places: otherwise all load their next
// items at once. That changes no result.
#pragma once

#include <cstdint>

#include "cuda/sparse_attention/backward_sm90/shared.cuh"

namespace winnow::cuda::sparse_attention::backward_sm90 {

/// Delays the blocks that have an item less than others, by up to what an item takes.
template <class T>
__device__ void delay_start(const BackwardSm90Parameters<T>& params) {
  const auto block = static_cast<int>(blockIdx.x);
  const auto grid = static_cast<int>(gridDim.x);
  const int with_more = params.items % grid;
  if (with_more == 0 || block < with_more || block + grid >= params.items) return;
  // The lesser of two items, lest one long row delays many short ones.
  const int blocks = min(item_of(params, block).blocks, item_of(params, block + grid).blocks);
  constexpr int kCycles = 9000;  // of 64 keys
  const std::int64_t most = std::int64_t{blocks + 1} * kCycles;
  const std::int64_t delay = most * (block - with_more) / (grid - with_more);
  const std::int64_t start = clock64();
  while (clock64() - start < delay) __nanosleep(500);
}

}  // namespace winnow::cuda::sparse_attention::backward_sm90
