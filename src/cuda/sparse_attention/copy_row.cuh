// SPDX-License-Identifier: Apache-2.0
// The copy of a row of any width and alignment into shared memory, for the general kernels.
#pragma once

#include "cuda/common/mma.cuh"

namespace winnow::cuda {

inline constexpr int kLanesPerRow = 8;  // lanes that copy one row together

/// Eight lanes copy one row; null: they write zeros. `aligned`: the row begins at a 16-byte
/// boundary and is copied by cp.async, which the caller commits.
template <class T>
__device__ void copy_row(T* to, const T* from, int dim, bool aligned, int lane) {
  constexpr int kVector = 16 / sizeof(T);
  if (from == nullptr) {
#pragma unroll 1
    for (int d = lane * kVector; d < dim; d += kLanesPerRow * kVector) {
      *reinterpret_cast<uint4*>(to + d) = uint4{};
    }
  } else if (aligned) {
    for (int d = lane * kVector; d < dim; d += kLanesPerRow * kVector) {
      copy_16_bytes_async(to + d, from + d);
    }
  } else {
#pragma unroll 1
    for (int d = lane; d < dim; d += kLanesPerRow) to[d] = from[d];
  }
}

}  // namespace winnow::cuda
