// SPDX-License-Identifier: Apache-2.0
// Rows of the forward whose logits are so large that the rounding of products q.k tells: they are
// attended once more, in double.
//
// The tensor cores' sums of products are off by a few units in the last place. That is a part of
// the logit, and so of the exponent: where logits reach 2^13 it changes probabilities by more than
// their rounding to 16 bits does. It matters only where several keys share a row, which is rare at
// such heights: elsewhere the largest logit has all of it.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/common/mma.cuh"
#include "cuda/common/softmax.cuh"
#include "cuda/sparse_attention/parameters.cuh"

namespace winnow::cuda::sparse_attention {

/// Whether a row has to be attended once more. `total` is the sum of exp(logit - max_logit), 1 of
/// which is the largest logit's own.
__device__ inline bool is_shared_at_large_logits(float max_logit, float total) {
  constexpr float kMaxLogit = 0x1p12f;
  constexpr float kMaxTotal = 1 + 0x1p-12f;
  return fabsf(max_logit) > kMaxLogit && total > kMaxTotal;
}

/// A normalizer that marks its row, to be attended once more when out is stored. One of 0 means
/// that nothing is left to the keys.
__device__ inline float marked(float normalizer) { return -normalizer; }
__device__ inline bool is_marked(float normalizer) { return normalizer < 0; }

/// exp(x) of a difference of logits, x <= 0 or the exponent of a sink.
__device__ inline float exp_of_difference(double x) {
  return fast_exp2(static_cast<float>(x * double{kLog2E}));
}

/// out of one head, columns [begin, end), and on request lse and max_logits. Called by a warp whose
/// earlier writes they replace. A row's sums have one order, that of its slots.
template <class T>
__device__ void attend_in_double(const ForwardParameters& params, std::int64_t t, int head,
                                 int begin, int end, bool writes_lse) {
  constexpr int kLanes = 32;
  constexpr int kColumns = 8;  // of a lane at a time
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const T* const q =
      static_cast<const T*>(params.q) + t * params.q_token_stride + head * params.q_head_stride;
  T* const out =
      static_cast<T*>(params.out) + t * params.out_token_stride + head * params.out_head_stride;
  const double scale = double{params.power} * params.rest;
  const int slots = slots_of_row(params, t);
  __syncwarp();  // the writes of other lanes come before this one's
#pragma unroll 1
  for (int first = begin; first < end; first += kLanes * kColumns) {
    double maximum = -INFINITY;
    double sum = 0;
    double values[kColumns] = {};
#pragma unroll 1
    for (int slot = 0; slot < slots; ++slot) {
      const std::int32_t key = __ldg(params.indices + t * params.indices_stride + slot);
      if (key < 0 || key >= params.keys) continue;
      const T* const row = static_cast<const T*>(params.kv) + key * params.kv_stride;
      double product = 0;
#pragma unroll 1
      for (int d = lane; d < params.qk_dim; d += kLanes) {
        product += double{static_cast<float>(q[d])} * static_cast<float>(row[d]);
      }
#pragma unroll
      for (int step = kLanes / 2; step > 0; step /= 2) {
        product += __shfl_xor_sync(0xffffffffu, product, step);
      }
      const double logit = product * scale;
      if (logit > maximum) {
        const float factor = exp_of_difference(maximum - logit);
        maximum = logit;
        sum *= factor;
#pragma unroll
        for (double& value : values) value *= factor;
      }
      const float p = exp_of_difference(logit - maximum);
      if (p == 0) continue;
      sum += p;
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        const int column = first + lane + i * kLanes;
        if (column < end) values[i] += double{p} * static_cast<float>(row[column]);
      }
    }
    const float sink = params.sink != nullptr ? __ldg(params.sink + head) : -INFINITY;
    const double normalizer = 1 / (sum + exp_of_difference(sink - maximum));
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const int column = first + lane + i * kLanes;
      if (column < end) out[column] = from_float<T>(static_cast<float>(values[i] * normalizer));
    }
    if (!writes_lse || first > begin || lane != 0) continue;
    params.lse[t * params.lse_stride + head] =
        static_cast<float>(maximum + log2f(static_cast<float>(sum)) * double{kLn2});
    if (params.max_logits != nullptr) {
      params.max_logits[t * params.max_logits_stride + head] = static_cast<float>(maximum);
    }
  }
}

}  // namespace winnow::cuda::sparse_attention
