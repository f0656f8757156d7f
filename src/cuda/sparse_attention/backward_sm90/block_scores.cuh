// SPDX-License-Identifier: Apache-2.0
// P and dS of a block from the accumulators of S and dP. Every pass of the backward uses this code,
// so that all of them see the same bits.
#pragma once

#include <cstdint>

#include "cuda/common/own_index.cuh"
#include "cuda/sparse_attention/backward_sm90/shared.cuh"

namespace winnow::cuda::sparse_attention::backward_sm90 {

/// What the scores of a lane's two heads need, from their HeadConstants.
struct LaneHeads {
  __device__ explicit LaneHeads(const HeadConstants* first)  // the other one is 8 rows on
      : lse_log2{first[0].lse_log2, first[8].lse_log2},
        share{first[0].share, first[8].share},
        offset{first[0].offset, first[8].offset} {}
  float lse_log2[2];
  float share[2];
  float offset[2];
};

/// From the products q . k of the lane's heads: P, and exp(s - lse), which is 0 where there is no
/// key. Both hold two neighbours in a word. A bit of `valid` a column says whether it is a key.
template <class T>
__device__ void probabilities(float (&s)[32], const std::uint32_t (&valid)[2],
                              const LaneHeads& heads, float scale_log2, std::uint32_t (&p)[16],
                              std::uint32_t (&exponentials)[16]) {
  const unsigned shift = own_thread() % 4 * 2;
  const std::uint32_t bits[2] = {valid[0] >> shift, valid[1] >> shift};  // from the lane's first
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    const bool is_key = bits[i / 16] >> (i / 4 % 4 * 8 + i % 2) & 1;
    const float exponent = fmaf(s[i], scale_log2, -heads.lse_log2[i / 2 % 2]);
    s[i] = is_key ? fast_exp2(at_most_0(exponent)) : 0.0f;
  }
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const float share = heads.share[i % 2];
    p[i] = pack<T>(s[2 * i] * share, s[2 * i + 1] * share);
    exponentials[i] = pack<T>(s[2 * i], s[2 * i + 1]);
  }
}

/// Turns exp(s - lse) into dS, times the scale; dP are the products d_out . v.
template <class T>
__device__ void score_gradients(const float (&dp)[32], const LaneHeads& heads, float scale,
                                std::uint32_t (&ds)[16]) {
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const float share = heads.share[i % 2];
    const float offset = heads.offset[i % 2];
    const float2 pair = unpack_pair<T>(ds[i]);
    const float first = fmaf(share, dp[2 * i], offset) * scale;
    const float second = fmaf(share, dp[2 * i + 1], offset) * scale;
    // 0 without a key, whatever dP is there.
    ds[i] = pack<T>(pair.x == 0 ? 0 : pair.x * first, pair.y == 0 ? 0 : pair.y * second);
  }
}

}  // namespace winnow::cuda::sparse_attention::backward_sm90
