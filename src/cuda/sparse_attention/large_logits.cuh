// SPDX-License-Identifier: Apache-2.0
// Rows of the forward whose logits are so large that the rounding of products q.k tells: they are
// attended once more, in double.
//
// The tensor cores' sums of products are off by a few units in the last place. That is a part of
// the logit, and so of the exponent: where logits reach 2^13 it changes probabilities by more than
// their rounding to 16 bits does. It matters only where the largest logit shares its row, with
// other keys or with a sink, which is rare at such heights: elsewhere it has all of it.
//
// Only out is made again. lse stays what the tensor cores' products give, of which the backward
// pass makes the same ones.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/common/mma.cuh"
#include "cuda/common/softmax.cuh"
#include "cuda/sparse_attention/parameters.cuh"

namespace winnow::cuda::sparse_attention {

/// Whether a row has to be attended once more. `share` is the probability of its largest logit.
/// `has_rival`: another logit is so close that rounding alone may have parted the two.
__device__ inline bool is_shared_at_large_logits(float max_logit, float share,
                                                 bool has_rival = false) {
  constexpr float kMaxLogit = 0x1p12f;
  constexpr float kWhole = 1 - 0x1p-12f;
  return fabsf(max_logit) > kMaxLogit && share > 0 && (share < kWhole || has_rival);
}

/// A normalizer that marks its row, to be attended once more when out is stored. One of 0 means
/// that nothing is left to the keys.
__device__ inline float marked(float normalizer) { return -normalizer; }
__device__ inline bool is_marked(float normalizer) { return normalizer < 0; }

/// exp(x) of a difference of logits, x <= 0 or the exponent of a sink.
__device__ inline float exp_of_difference(double x) {
  return fast_exp2(static_cast<float>(x * double{kLog2E}));
}

/// out of one head, columns [begin, end). Called by a warp. A row's sums have one order, that of
/// its slots.
template <class T>
__device__ void attend_in_double(const ForwardParameters& params, std::int64_t t, int head,
                                 int begin, int end) {
  constexpr int kLanes = 32;
  constexpr int kColumns = 8;  // of a lane at a time
  const int lane = static_cast<int>(threadIdx.x % kLanes);
  const T* const q =
      static_cast<const T*>(params.q) + t * params.q_token_stride + head * params.q_head_stride;
  T* const out =
      static_cast<T*>(params.out) + t * params.out_token_stride + head * params.out_head_stride;
  const double scale = double{params.power} * params.rest;
  const int slots = slots_of_row(params, t);
  __syncwarp();  // other lanes' writes of out come before this one's
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
#pragma unroll 4
      for (int d = lane; d < params.qk_dim; d += kLanes) {
        product += double{static_cast<float>(q[d])} * static_cast<float>(row[d]);
      }
#pragma unroll
      for (int step = kLanes / 2; step > 0; step /= 2) {
        product += __shfl_xor_sync(0xffffffffu, product, step);
      }
      const double logit = product * scale;
      if (logit == -INFINITY) continue;  // nothing to measure it from, if it comes first
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
  }
}

/// Attends those of kHeads heads once more whose normalizers, in shared memory, are marked; all
/// warps of the block call it. Their writes of out come before, behind a barrier.
template <class T, int kHeads, int kWarps>
__device__ void attend_marked_heads(const ForwardParameters& params, std::int64_t t, int first_head,
                                    const float* normalizers) {
  constexpr int kLanes = 32;
  static_assert(kHeads <= kWarps * kLanes);
  const int warp = static_cast<int>(threadIdx.x / kLanes);
  const int own = warp + static_cast<int>(threadIdx.x % kLanes) * kWarps;
  unsigned marked = __ballot_sync(0xffffffffu, own < kHeads && is_marked(normalizers[own]));
#pragma unroll 1
  for (; marked != 0; marked &= marked - 1) {
    const int head = first_head + warp + (__ffs(marked) - 1) * kWarps;
    attend_in_double<T>(params, t, head, 0, params.v_dim);
  }
}

}  // namespace winnow::cuda::sparse_attention
