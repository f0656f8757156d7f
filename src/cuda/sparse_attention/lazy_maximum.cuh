// SPDX-License-Identifier: Apache-2.0
// The running maximum of Hopper's forward kernels, from which the logits of a row are measured. It
// moves only when scores pass it by far, so that accumulators are seldom rescaled.
#pragma once

#include <cmath>

#include "cuda/common/softmax.cuh"
#include "cuda/sparse_attention/parameters.cuh"

namespace winnow::cuda::sparse_attention {

// The running maximum moves when a score passes it by this much (log2), unless a kernel has a rule
// of its own: P is at most 2^8, and out is seldom rescaled.
inline constexpr float kLazyMaximum = 8;
// The largest logit of a maximum (log2) up to which exponents are s * scale - maximum in one
// instruction. The maximum is rounded by 2^-24 of itself, which costs P at most 2^-14 of its value.
// Larger ones are subtracted from the products themselves, where close ones have an exact
// difference.
inline constexpr float kMaxSubtrahend = 1024;

/// The running maximum of one row, as a product q.k, and its sum of exponentials.
struct RowState {
  float largest = -INFINITY;
  float maximum = -INFINITY;  // the one that is subtracted; it may lag behind `largest`
  float sum = 0;              // over this lane's columns
};

/// The factors of scale as the exponentials use them: those of ForwardParameters.
struct ExponentScale {
  float power, rest_log2, scale_log2;

  /// By which the logit of `to` exceeds that of `from`, two products, in log2; infinite where
  /// `from` is -inf. The products times a power of two are exact, and differences of them cannot
  /// overflow.
  __device__ float rise(float from, float to) const {
    return fmaf(-from, power, to * power) * rest_log2;
  }
};

/// What is subtracted from the logits of a row, in log2.
__device__ inline float subtrahend_of(const RowState& row, const ExponentScale& scale) {
  return row.maximum == -INFINITY ? 0.0f : row.maximum * scale.scale_log2;
}

/// Whether the largest product of a block passes the running maximum by far. scale > 0.
__device__ inline bool is_passed(const RowState& row, float largest, const ExponentScale& scale) {
  return scale.rise(row.maximum, largest) > kLazyMaximum;
}

/// Moves the running maximum to a product. Returns by what earlier sums are multiplied.
__device__ inline float move_maximum(RowState& row, float to, const ExponentScale& scale) {
  const float rescale = fast_exp2(-scale.rise(row.maximum, to));
  row.maximum = to;
  row.sum *= rescale;
  return rescale;
}

}  // namespace winnow::cuda::sparse_attention
