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

/// Fragments of the first kHeld steps of 16 channels of an operand, kept in registers.
template <int kHeld>
struct HeldSteps {
  static constexpr int kSteps = kHeld;
  std::uint32_t fragments[kHeld > 0 ? kHeld : 1][4];
};

/// c [16, keys] = A [16, d] K [keys, d]^T. `a` and `k` are this lane's fragment addresses (rows
/// first, columns first) of rows of `steps` times 16 channels, K's row_bytes apart; `held` is A's
/// beginning, and not used where A is shorter. kParts steps are summed apart, so that dependent
/// chains of products are short; their operands are loaded together, one group ahead.
template <class T, int kParts, int kHeld, int kBlocks>
__device__ void multiply_rows(float (&c)[kBlocks][4], const HeldSteps<kHeld>& held, std::uint32_t a,
                              std::uint32_t k, int row_bytes, int steps) {
  static_assert(sizeof(T) == 2 && kBlocks % 2 == 0 && kHeld % kParts == 0);
  constexpr int kPairs = kBlocks / 2;
  constexpr int kStepBytes = 16 * sizeof(T);
  constexpr int kHeldGroups = kHeld / kParts;
  struct Operands {
    std::uint32_t a[kParts][4];
    std::uint32_t k[kParts][kPairs][4];
  };
  float parts[kParts][kBlocks][4] = {};
  const auto load_a = [&](Operands& operands, int step, int part) {
    load_fragments_at(operands.a[part], a + step * kStepBytes);
  };
  const auto load_k = [&](Operands& operands, int step, int part) {
#pragma unroll
    for (int n = 0; n < kPairs; ++n) {
      load_fragments_at(operands.k[part][n], k + n * 16 * row_bytes + step * kStepBytes);
    }
  };
  const auto multiply = [&](const Operands& operands, const std::uint32_t(&fragment)[4], int part) {
#pragma unroll
    for (int n = 0; n < kPairs; ++n) {
      const std::uint32_t(&b)[4] = operands.k[part][n];
      multiply_add<T>(parts[part][n * 2], fragment, b[0], b[1]);
      multiply_add<T>(parts[part][n * 2 + 1], fragment, b[2], b[3]);
    }
  };
  const int groups = steps / kParts;
  const bool has_held = groups >= kHeldGroups;
  Operands current;
#pragma unroll 1
  for (int step = groups * kParts; step < steps; ++step) {
    load_a(current, step, 0);
    load_k(current, step, 0);
    multiply(current, current.a[0], 0);
  }
  if (groups > 0) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      if (kHeld == 0 || !has_held) load_a(current, part, part);
      load_k(current, part, part);
    }
  }
  if (has_held) {
#pragma unroll
    for (int group = 0; group < kHeldGroups; ++group) {
      Operands next;
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        // Behind the last step there is nothing to load.
        const bool is_last = group + 1 == kHeldGroups;
        const int step = (is_last ? min(kHeldGroups, groups - 1) : group + 1) * kParts + part;
        if (is_last) load_a(next, step, part);
        load_k(next, step, part);
      }
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        multiply(current, held.fragments[group * kParts + part], part);
      }
      current = next;
    }
  }
#pragma unroll 2
  for (int group = has_held ? kHeldGroups : 0; group < groups; ++group) {
    Operands next;
    const int step = min(group + 1, groups - 1) * kParts;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      load_a(next, step + part, part);
      load_k(next, step + part, part);
    }
#pragma unroll
    for (int part = 0; part < kParts; ++part) multiply(current, current.a[part], part);
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
