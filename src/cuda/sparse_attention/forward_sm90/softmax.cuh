// SPDX-License-Identifier: Apache-2.0
// The online softmax of a math warpgroup: S of its block becomes P.
#pragma once

#include <cstdint>

#include "cuda/common/mma.cuh"
#include "cuda/hopper/quad.cuh"
#include "cuda/hopper/store_matrices.cuh"
#include "cuda/sparse_attention/forward_sm90/shared.cuh"

namespace winnow::cuda::sparse_attention::forward_sm90 {

using Scores = float[kBlock / 2];                     // the accumulator of S
using Probabilities = std::uint32_t[kBlock / 16][4];  // P as fragments of 16 keys

/// Sets the scores of slots without a key to -inf.
__device__ inline void mask(Scores& s, const BlockInfo& info) {
#pragma unroll
  for (int word = 0; word < 2; ++word) {
    const std::uint32_t bits = info.valid[word] >> (2 * (threadIdx.x % 4));
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      if (!((bits >> (8 * (i / 4) + i % 2)) & 1)) s[16 * word + i] = -INFINITY;
    }
  }
}

/// By what the accumulator and the sums of a lane's two rows are multiplied.
struct Rescale {
  float factors[2] = {1, 1};

  /// The same for all lanes of a warp.
  __device__ bool is_needed() const {
    return __any_sync(0xffffffffu, factors[0] != 1 || factors[1] != 1);
  }
  __device__ void apply(float (&out)[128]) const {
#pragma unroll
    for (int i = 0; i < 128; ++i) out[i] *= factors[i / 2 % 2];
  }
};

/// By what a lane's two rows are rescaled, and what is subtracted from their logits (log2).
struct MaximumMoves {
  Rescale rescale;
  float subtrahend[2];
};

/// Moves the running maxima of a lane's two rows.
__device__ inline MaximumMoves move_maxima(Scores& s, RowState (&state)[2],
                                           const ExponentScale& scale) {
  MaximumMoves moves;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float largest = fmaxf(s[2 * half], s[2 * half + 1]);
#pragma unroll
    for (int i = 1; i < kBlock / 8; ++i) {
      largest = fmaxf(largest, fmaxf(s[4 * i + 2 * half], s[4 * i + 2 * half + 1]));
    }
    const MaximumMove move = move_maximum(state[half], quad_max(largest), scale);
    moves.rescale.factors[half] = move.rescale;
    moves.subtrahend[half] = move.subtrahend;
  }
  // Maxima whose logits are large are subtracted from the products themselves, where close ones
  // have an exact difference: rounded, the logit of the maximum is off by more than the
  // exponentials bear.
  if (__any_sync(0xffffffffu,
                 fmaxf(fabsf(moves.subtrahend[0]), fabsf(moves.subtrahend[1])) > kMaxSubtrahend)) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool is_large = fabsf(moves.subtrahend[half]) > kMaxSubtrahend;
      const float maximum = is_large ? state[half].maximum : 0.0f;
      if (is_large) moves.subtrahend[half] = 0;
#pragma unroll
      for (int i = 0; i < kBlock / 8; ++i) {
        s[4 * i + 2 * half] -= maximum;
        s[4 * i + 2 * half + 1] -= maximum;
      }
    }
  }
  return moves;
}

/// Turns 16 columns of S into P, rounded; sums are unrounded.
template <class T>
__device__ inline void exponentiate(const Scores& s, int slice, const MaximumMoves& moves,
                                    const ExponentScale& scale, RowState (&state)[2],
                                    std::uint32_t (&p)[4]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float* pair = &s[8 * slice + 4 * i + 2 * half];
      const float low = fast_exp2(fmaf(pair[0], scale.scale_log2, -moves.subtrahend[half]));
      const float high = fast_exp2(fmaf(pair[1], scale.scale_log2, -moves.subtrahend[half]));
      state[half].sum += low + high;
      p[2 * i + half] = pack<T>(low, high);
    }
  }
}

/// Stores 16 columns of P in a tile, a K-major operand [heads, keys].
__device__ inline void store_probabilities(const std::uint32_t (&p)[4], int slice,
                                           std::uint32_t tile) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int row = static_cast<int>(threadIdx.x) % kWarpgroup / 32 * 16 + lane % 16;
  store_matrices(tile + tile_offset(row, 2 * slice + lane / 16), p);
}

}  // namespace winnow::cuda::sparse_attention::forward_sm90
