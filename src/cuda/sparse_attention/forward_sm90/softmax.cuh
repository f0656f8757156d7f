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

// P is made from the running maximum before the block. The maximum moves when a lane's exponentials
// add up to more than this, so that P is at most 2^8: unlike the largest score, the sum costs no
// instruction and no exchange between lanes.
inline constexpr float kMaxSum = 256;

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

/// The largest of a lane's products of one of its rows.
__device__ inline float largest_product(const Scores& s, int half) {
  float largest = fmaxf(s[2 * half], s[2 * half + 1]);
#pragma unroll
  for (int i = 1; i < kBlock / 8; ++i) {
    largest = fmaxf(largest, fmaxf(s[4 * i + 2 * half], s[4 * i + 2 * half + 1]));
  }
  return largest;
}

/// Whether exponentials can be made from the running maximum of a row at once.
__device__ inline bool is_plain(const RowState& row, float subtrahend) {
  return row.maximum != -INFINITY && fabsf(subtrahend) <= kMaxSubtrahend;
}

struct MaximumMoves {
  Rescale rescale;
  float subtrahends[2];  // of the maxima after the moves
};
/// Moves the running maxima of a lane's two rows where they have to. `subtrahends` are those of the
/// maxima before, and `sums` those of the exponentials from them. Whether a maximum moves depends
/// on its row alone, not on the other rows of the warp.
__device__ inline MaximumMoves move_maxima(Scores& s, RowState (&state)[2], const float (&sums)[2],
                                           const ExponentScale& scale,
                                           const float (&subtrahends)[2]) {
  MaximumMoves moves;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    RowState& row = state[half];
    const float largest = quad_max(largest_product(s, half));
    const float largest_sum = quad_max(sums[half]);
    row.largest = fmaxf(row.largest, largest);
    if (is_plain(row, subtrahends[half]) ? largest_sum > kMaxSum : is_passed(row, largest, scale)) {
      moves.rescale.factors[half] = move_maximum(row, largest, scale);
    }
    float& subtrahend = moves.subtrahends[half];
    subtrahend = subtrahend_of(row, scale);
    // Maxima whose logits are large are subtracted from the products themselves, where close ones
    // have an exact difference: rounded, the logit of the maximum is off by more than the
    // exponentials bear.
    const bool is_large = fabsf(subtrahend) > kMaxSubtrahend;
    const float maximum = is_large ? row.maximum : 0.0f;
    if (is_large) subtrahend = 0;
#pragma unroll
    for (int i = 0; i < kBlock / 8; ++i) {
      s[4 * i + 2 * half] -= maximum;
      s[4 * i + 2 * half + 1] -= maximum;
    }
  }
  return moves;
}

/// Turns 16 columns of S into P, rounded; sums are unrounded.
template <class T>
__device__ inline void exponentiate(const Scores& s, int slice, const float (&subtrahends)[2],
                                    const ExponentScale& scale, float (&sums)[2],
                                    std::uint32_t (&p)[4]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float* pair = &s[8 * slice + 4 * i + 2 * half];
      const float low = fast_exp2(fmaf(pair[0], scale.scale_log2, -subtrahends[half]));
      const float high = fast_exp2(fmaf(pair[1], scale.scale_log2, -subtrahends[half]));
      sums[half] += low + high;
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
