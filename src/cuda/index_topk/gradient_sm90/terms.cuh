// SPDX-License-Identifier: Apache-2.0
// The sums of a block with products that are not finite, term by term: what a > 0 excludes must not
// enter as 0 * inf.
#pragma once

#include "cuda/index_topk/gradient_sm90/shared.cuh"

namespace winnow::cuda::gradient_sm90 {

/// x, of which the compiler knows nothing. It would compute addresses of these rare loops ahead and
/// keep them in registers that the usual way needs.
__device__ inline int unknown(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

template <class T>
__device__ float element(const std::byte* tile, int row, int column) {
  return static_cast<float>(
      *reinterpret_cast<const T*>(tile + tile_offset(row, column / 8) + column % 8 * 2));
}

/// Which of the products a [keys, heads] are positive, of the two keys of a lane. Without a key
/// none is.
template <int kHeads>
struct Positive {
  Heads<kHeads> of_key[2];
};
template <int kHeads>
__device__ Positive<kHeads> positive_of(const float (&a)[kHeads / 2]) {
  Positive<kHeads> positive{};
#pragma unroll
  for (int i = 0; i < kHeads / 2; ++i) {
    positive.of_key[i / 2 % 2] |= Heads<kHeads>{a[i] > 0} << column_of(i / 4, i % 2);
  }
#pragma unroll
  for (Heads<kHeads>& of_key : positive.of_key) {
    of_key |= __shfl_xor_sync(0xffffffffu, of_key, 1);
    of_key |= __shfl_xor_sync(0xffffffffu, of_key, 2);
  }
  return positive;
}

/// d_q^T += k^T d_scores [columns, heads].
template <class T, int kHeads>
__device__ void add_query_terms(const SharedStorage<T, kHeads>& shared, int stage,
                                const Scores<kHeads>& scores, float (&d_q)[kTiles][kHeads / 2]) {
#pragma unroll 1
  for (int key = 0; key < kBlock; ++key) {
    const int first_head = unknown(column_of(0, 0));
    const int column = unknown(row_of(0));
#pragma unroll
    for (int i = 0; i < kHeads / 2; ++i) {
      const int h = first_head + i / 4 * 8 + i % 2;
      if (!(scores.positive[key] >> h & 1)) continue;
      const float d_score = element<T>(scores.d_scores, h, key);
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        d_q[tile][i] += d_score * element<T>(shared.k[stage][tile], key, column + i / 2 % 2 * 8);
      }
    }
  }
}

/// d_k = weights q [keys, 64 columns].
template <class T, int kHeads>
__device__ void add_key_terms(const SharedStorage<T, kHeads>& shared, int tile,
                              const Positive<kHeads>& positive, int heads, const float* weights,
                              float weight_factor, float (&d_k)[32]) {
#pragma unroll
  for (int i = 0; i < 32; ++i) d_k[i] = 0;
#pragma unroll 1
  for (int h = 0; h < heads; ++h) {
    const float weight = weights[h] * weight_factor;
    const int first_column = unknown(column_of(0, 0));
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      if (!(positive.of_key[i / 2 % 2] >> h & 1)) continue;
      d_k[i] += weight * element<T>(shared.q[tile], h, first_column + i / 4 * 8 + i % 2);
    }
  }
}

}  // namespace winnow::cuda::gradient_sm90
