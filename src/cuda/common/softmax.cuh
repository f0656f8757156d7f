// SPDX-License-Identifier: Apache-2.0
// The online softmax in powers of two: its exponential, and the results of a row from its largest
// logit and its sum.
#pragma once

#include <cmath>

namespace winnow::cuda {

inline constexpr float kLog2E = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;

/// 2^x with a relative error of 2^-22; 0 for results below the normal numbers, and for -inf.
__device__ inline float fast_exp2(float x) {
  float result = 0;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

/// The base that logits are measured from: the largest, or 0 while there is none, so that -inf is
/// never subtracted from -inf.
__device__ inline float softmax_base(float largest) { return largest == -INFINITY ? 0 : largest; }

struct RowEnd {
  float lse;         // natural log, keys only
  float max_logit;   // natural
  float normalizer;  // by which the sum of 2^(s - largest) * value is multiplied
};

/// The results of a row from its `largest` logit and its `sum` of 2^(s - softmax_base(largest)),
/// with s in units of log2. `sink` is a natural logit, -inf for none. A sum of 0 means no keys.
__device__ inline RowEnd finish_row(float largest, float sum, float sink) {
  if (sum == 0) return {-INFINITY, -INFINITY, 0};
  RowEnd row{(largest + log2f(sum)) * kLn2, largest * kLn2, 0};
  if (sink == INFINITY) return row;
  // In natural logits, because a finite sink may overflow in units of log2.
  const float base = fmaxf(row.max_logit, sink);
  const float keys = expf(row.max_logit - base);
  row.normalizer = keys / (sum * keys + expf(sink - base));
  return row;
}

}  // namespace winnow::cuda
