// SPDX-License-Identifier: Apache-2.0
// The product of 16 rows with the rows of a tile of keys, both in shared memory, by one warp of the
// general kernels.
#pragma once

#include <cstdint>

#include "cuda/common/mma.cuh"

namespace winnow::cuda::sparse_attention {

// Tiles are known by 32-bit addresses in shared memory: pointers would take twice the registers.
template <class T>
__device__ T* element_at(std::uint32_t shared) {
  return static_cast<T*>(__cvta_shared_to_generic(shared));
}
/// As load_fragments of common/mma.cuh.
__device__ inline void load_fragments_at(std::uint32_t (&fragments)[4], std::uint32_t row) {
  load_fragments(fragments, element_at<const void>(row));
}
__device__ inline void load_transposed_at(std::uint32_t (&fragments)[4], std::uint32_t row) {
  load_fragments_transposed(fragments, element_at<const void>(row));
}

/// The address that a lane gives for a fragment at the corner of a tile.
__device__ inline std::uint32_t fragment_address(std::uint32_t tile, int row_bytes,
                                                 const BlockOffset& offset) {
  return tile + offset.row * row_bytes + offset.column * 2;
}

/// c [16, keys] = A [16, d] K [keys, d]^T. `a` and `k` are this lane's fragment addresses (rows
/// first, columns first) of rows of `steps` times 16 channels, K's row_bytes apart. kParts steps are
/// summed apart, so that dependent chains of products are short; their operands are loaded
/// together, one group ahead.
template <class T, int kParts, int kBlocks>
__device__ void multiply_rows(float (&c)[kBlocks][4], std::uint32_t a, std::uint32_t k,
                              int row_bytes, int steps) {
  static_assert(sizeof(T) == 2 && kBlocks % 2 == 0);
  constexpr int kPairs = kBlocks / 2;
  struct Operands {
    std::uint32_t a[kParts][4];
    std::uint32_t k[kParts][kPairs][4];
  };
  float parts[kParts][kBlocks][4] = {};
  const auto load = [&](Operands& operands, int step, int part) {
    constexpr int kStepBytes = 16 * sizeof(T);
    load_fragments_at(operands.a[part], a + step * kStepBytes);
#pragma unroll
    for (int n = 0; n < kPairs; ++n) {
      load_fragments_at(operands.k[part][n], k + n * 16 * row_bytes + step * kStepBytes);
    }
  };
  const auto multiply = [&](const Operands& operands, int part) {
#pragma unroll
    for (int n = 0; n < kPairs; ++n) {
      const std::uint32_t(&b)[4] = operands.k[part][n];
      multiply_add<T>(parts[part][n * 2], operands.a[part], b[0], b[1]);
      multiply_add<T>(parts[part][n * 2 + 1], operands.a[part], b[2], b[3]);
    }
  };
  const int groups = steps / kParts;
  Operands current;
#pragma unroll 1
  for (int step = groups * kParts; step < steps; ++step) {
    load(current, step, 0);
    multiply(current, 0);
  }
  if (groups > 0) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) load(current, part, part);
  }
#pragma unroll 2
  for (int group = 0; group < groups; ++group) {
    Operands next;
    const int step = min(group + 1, groups - 1) * kParts;
#pragma unroll
    for (int part = 0; part < kParts; ++part) load(next, step + part, part);
#pragma unroll
    for (int part = 0; part < kParts; ++part) multiply(current, part);
    current = next;
  }
#pragma unroll
  for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      c[n][e] = parts[0][n][e];
#pragma unroll
      for (int part = 1; part < kParts; ++part) c[n][e] += parts[part][n][e];
    }
  }
}

}  // namespace winnow::cuda::sparse_attention
