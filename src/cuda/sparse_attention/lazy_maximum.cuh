// SPDX-License-Identifier: Apache-2.0
// The running maximum of Hopper's forward kernels, from which the logits of a row are measured. It
// moves only when a score passes it by far, so that accumulators are seldom rescaled.
#pragma once

#include <cmath>

#include "cuda/common/softmax.cuh"
#include "cuda/sparse_attention/parameters.cuh"

namespace winnow::cuda::sparse_attention {

// The running maximum moves only when a score passes it by this much (log2): P stays below 2^8, and
// out is seldom rescaled.
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

struct MaximumMove {
  float rescale;     // by which earlier sums are multiplied
  float subtrahend;  // which is subtracted from logits in log2
};

/// Takes the largest product of a block into account. scale > 0.
__device__ inline MaximumMove move_maximum(RowState& row, float largest,
                                           const ExponentScale& scale) {
  row.largest = fmaxf(row.largest, largest);
  const float rise = scale.rise(row.maximum, largest);
  const bool moves = rise > kLazyMaximum;
  MaximumMove move;
  move.rescale = moves ? fast_exp2(-rise) : 1.0f;
  row.maximum = moves ? largest : row.maximum;
  row.sum *= move.rescale;
  move.subtrahend = row.maximum == -INFINITY ? 0.0f : row.maximum * scale.scale_log2;
  return move;
}

}  // namespace winnow::cuda::sparse_attention
