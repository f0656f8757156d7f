// SPDX-License-Identifier: Apache-2.0
// The end of an online softmax, in powers of two: what a row's largest logit and sum say of it.
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

/// What logits are measured from: their largest, or 0 while there is none, so that -inf is never
/// taken from -inf.
__device__ inline float softmax_base(float largest) { return largest == -INFINITY ? 0 : largest; }

struct RowEnd {
  float lse;         // natural log, keys only
  float max_logit;   // natural
  float normalizer;  // what the sum of 2^(s - largest) * value is multiplied by
};

/// `largest` and `sum` of 2^(s - softmax_base(largest)), with s in units of log2; `sink` is a
/// natural logit, -inf for none. A sum of 0: there were no keys.
__device__ inline RowEnd finish_row(float largest, float sum, float sink) {
  if (sum == 0) return {-INFINITY, -INFINITY, 0};
  RowEnd row{(largest + log2f(sum)) * kLn2, largest * kLn2, 0};
  if (sink == INFINITY) return row;
  // Natural logits: a finite sink in units of log2 may be infinite.
  const float base = fmaxf(row.max_logit, sink);
  const float keys = expf(row.max_logit - base);
  row.normalizer = keys / (sum * keys + expf(sink - base));
  return row;
}

}  // namespace winnow::cuda
