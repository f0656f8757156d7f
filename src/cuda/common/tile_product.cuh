// SPDX-License-Identifier: Apache-2.0
// Products of tiles in shared memory by one warp, on the tensor cores for 16-bit types and by fused
// multiply-adds for f32; both use the accumulator layout of mma.sync.
#pragma once

#include <type_traits>

#include "cuda/common/mma.cuh"

namespace winnow::cuda {

// A warp's accumulator is c[blocks of 16 rows][blocks of 8 columns][4]. Element e of a lane's four
// is in this row and column of its block:
__device__ inline int row_in_block(int lane, int e) { return lane / 4 + e / 2 * 8; }
__device__ inline int column_in_block(int lane, int e) { return lane % 4 * 2 + e % 2; }

template <int kM, int kN>
__device__ void clear_accumulators(float (&c)[kM][kN][4]) {
#pragma unroll
  for (int i = 0; i < kM; ++i) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) c[i][n][e] = 0;
    }
  }
}

/// Loads the fragments of the 16 x 16 block at (outer, k) of an operand: [outer, k], or [k, outer].
template <bool kIsA, bool kUnitK, class T>
__device__ void load_block(std::uint32_t (&fragments)[4], const T* tile, int stride, int outer,
                           int k, int lane) {
  // A as [m, k] and B as [k, n] are read rows first, A as [k, m] and B as [n, k] columns first.
  const BlockOffset offset = kUnitK == kIsA ? rows_first(lane) : columns_first(lane);
  if constexpr (kUnitK) {
    load_fragments(fragments, tile + (outer + offset.row) * stride + k + offset.column);
  } else {
    load_fragments_transposed(fragments, tile + (k + offset.row) * stride + outer + offset.column);
  }
}

/// Loads four elements along k of an f32 operand.
template <bool kUnitK>
__device__ float4 load_four(const float* tile, int stride, int outer, int k) {
  if constexpr (kUnitK) {
    return *reinterpret_cast<const float4*>(tile + outer * stride + k);
  } else {
    const float* const from = tile + k * stride + outer;
    return {from[0], from[stride], from[2 * stride], from[3 * stride]};
  }
}

/// c += A [m, k] B [k, n]. An operand is K-major, [m or n, k], where its kUnitK is true, else
/// MN-major, [k, m or n]; strides are multiples of 16 bytes. `kDepth` is the size of k, a multiple
/// of 16.
template <int kDepth, bool kUnitKA, bool kUnitKB, class T, int kM, int kN>
__device__ void multiply_tile(float (&c)[kM][kN][4], const T* a, int a_stride, const T* b,
                              int b_stride) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  if constexpr (std::is_same_v<T, float>) {
#pragma unroll 2
    for (int k = 0; k < kDepth; k += 4) {
      float4 a_rows[kM][2];
#pragma unroll
      for (int i = 0; i < kM; ++i) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          a_rows[i][r] = load_four<kUnitKA>(a, a_stride, i * 16 + row_in_block(lane, r * 2), k);
        }
      }
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float4 y = load_four<kUnitKB>(b, b_stride, n * 8 + column_in_block(lane, e), k);
#pragma unroll
          for (int i = 0; i < kM; ++i) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
              const float4 x = a_rows[i][r];
              float& sum = c[i][n][r * 2 + e];
              sum = fmaf(x.x, y.x, sum);
              sum = fmaf(x.y, y.y, sum);
              sum = fmaf(x.z, y.z, sum);
              sum = fmaf(x.w, y.w, sum);
            }
          }
        }
      }
    }
  } else {
    static_assert(kN % 2 == 0);
#pragma unroll
    for (int k = 0; k < kDepth; k += 16) {
      std::uint32_t b_blocks[kN / 2][4];
#pragma unroll
      for (int n = 0; n < kN / 2; ++n) {
        load_block<false, kUnitKB>(b_blocks[n], b, b_stride, n * 16, k, lane);
      }
#pragma unroll
      for (int i = 0; i < kM; ++i) {
        std::uint32_t a_block[4];
        load_block<true, kUnitKA>(a_block, a, a_stride, i * 16, k, lane);
#pragma unroll
        for (int n = 0; n < kN / 2; ++n) {
          multiply_add<T>(c[i][n * 2], a_block, b_blocks[n][0], b_blocks[n][1]);
          multiply_add<T>(c[i][n * 2 + 1], a_block, b_blocks[n][2], b_blocks[n][3]);
        }
      }
    }
  }
}

/// c += the terms a(m, k) b(k, n) for which counts(m, k), one by one. It is for elements that are
/// not finite: their product with 0 would not be 0.
template <int kM, int kN, class A, class B, class Counts>
__device__ void add_terms(float (&c)[kM][kN][4], int depth, A a, B b, Counts counts) {
  const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll 1
  for (int k = 0; k < depth; ++k) {
#pragma unroll
    for (int i = 0; i < kM; ++i) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int m = i * 16 + row_in_block(lane, r * 2);
        if (!counts(m, k)) continue;
        const float x = a(m, k);
#pragma unroll
        for (int n = 0; n < kN; ++n) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& sum = c[i][n][r * 2 + e];
            sum = fmaf(x, b(k, n * 8 + column_in_block(lane, e)), sum);
          }
        }
      }
    }
  }
}

/// Stores two neighbours into a tile; `to` is aligned to the pair.
template <class T>
__device__ void put_pair(T* to, float first, float second) {
  if constexpr (std::is_same_v<T, float>) {
    *reinterpret_cast<float2*>(to) = {first, second};
  } else {
    *reinterpret_cast<std::uint32_t*>(to) = pack<T>(first, second);
  }
}

}  // namespace winnow::cuda
