// SPDX-License-Identifier: Apache-2.0
// What the general scores of index_topk are computed from: some query rows, and tiles of the keys
// that they see, one after another or from a list.
#pragma once

#include <cstdint>

#include "cuda/index_topk/plan.cuh"

namespace winnow::cuda::index_topk::general {

inline constexpr int kThreads = 256;

/// Query rows that see the same keys.
struct Rows {
  std::int64_t first;
  int count;
};

/// Tiles [first, end) of kTileKeys keys.
struct Tiles {
  int first, end;
};

// key(i) is the row of key i, counted from the first key of tile 0, or negative where there is
// none.
struct Neighbours {
  std::int64_t first;
  int keys;
  __device__ std::int64_t key(std::int64_t i) const { return first + i < keys ? first + i : -1; }
};
struct Listed {
  const std::int32_t* indices;
  int slots;       // that may hold a key
  int begin, end;  // other indices are no keys
  __device__ std::int64_t key(std::int64_t i) const {
    if (i >= slots) return -1;
    const std::int32_t key = indices[i];
    return key >= begin && key < end ? key : -1;
  }
};

}  // namespace winnow::cuda::index_topk::general
