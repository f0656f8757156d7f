// SPDX-License-Identifier: Apache-2.0
// Whether rows that are worked on at the same time name much the same keys, as neighbouring rows do
// that an indexer has selected for.
#pragma once

#include <cstdint>

#include "cuda/sparse_attention/parameters.cuh"

namespace winnow::cuda::sparse_attention {

/// Each warp takes one row and looks for 32 of its keys in the list of the row half a wave of
/// thread blocks further on; where lists do not ascend, it may not find them. Alike are lists that
/// have a quarter of their keys in common: those that an indexer selects over a smooth sequence
/// have more than a third, random ones the share of all keys that is in a list. Thread blocks look
/// at the same rows, so all that ask agree. Called by all kThreads threads of a block; `params` are
/// those of a forward or backward kernel.
template <int kThreads, class Parameters>
__device__ bool lists_are_alike(const Parameters& params) {
  const int rows = params.items / params.head_groups;
  const int distance = max(static_cast<int>(gridDim.x) / params.head_groups / 2, 1);
  constexpr int kWarps = kThreads / 32;
  bool is_found = false;
  if (rows > distance) {
    const auto warp = static_cast<int>(threadIdx.x / 32);
    const auto lane = static_cast<int>(threadIdx.x % 32);
    const std::int64_t row = std::int64_t{rows - distance} * warp / kWarps;
    const std::int64_t other = row + distance;
    // Slots without a key, -1, are larger than all keys.
    const auto key_of = [&](std::int64_t t, int slot) {
      return static_cast<std::uint32_t>(__ldg(params.indices + t * params.indices_stride + slot));
    };
    const int slots = slots_of_row(params, row);
    if (slots > 0) {
      const std::uint32_t key = key_of(row, static_cast<int>(std::int64_t{slots} * lane / 32));
      const int other_slots = slots_of_row(params, other);
      int begin = 0;
      int end = other_slots;
      while (begin < end) {
        const int middle = (begin + end) / 2;
        if (key_of(other, middle) < key) {
          begin = middle + 1;
        } else {
          end = middle;
        }
      }
      is_found = key < static_cast<std::uint32_t>(params.keys) && begin < other_slots &&
                 key_of(other, begin) == key;
    }
  }
  return __syncthreads_count(is_found) >= kThreads / 4;
}

}  // namespace winnow::cuda::sparse_attention
