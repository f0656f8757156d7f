// SPDX-License-Identifier: Apache-2.0
// Keeps persistent thread blocks from changing items at the same time, all of them storing results
// and loading queries at once.
#pragma once

#include <cstdint>

namespace winnow::cuda::sparse_attention {

/// Whether the calling thread block has two items or more, but one less than others: then it can
/// start later, by what their last item takes, and ends no later than they do. Items are dealt out
/// in turns.
__device__ inline bool has_time_to_spare(int items) {
  const auto block = static_cast<int>(blockIdx.x);
  const auto grid = static_cast<int>(gridDim.x);
  return items % grid != 0 && block >= items % grid && block + grid < items;
}

/// Delays a thread block for which has_time_to_spare is true; over all of them the delays go evenly
/// from none to nearly `most` cycles.
__device__ inline void spread_start(int items, std::int64_t most) {
  const int first = items % static_cast<int>(gridDim.x);
  const std::int64_t delay =
      most * (static_cast<int>(blockIdx.x) - first) / (static_cast<int>(gridDim.x) - first);
  const std::int64_t start = clock64();
  while (clock64() - start < delay) __nanosleep(500);
}

}  // namespace winnow::cuda::sparse_attention
