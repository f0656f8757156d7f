// SPDX-License-Identifier: Apache-2.0
// The online softmax in powers of two: its exponential, and the results of a row from its largest
// score and its sum. A score is a product q.k times the power of two in the scale, and a logit is
// `rest` times that (core/logit_scale.h).
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

/// min(x, 0) of x = logit - lse, whose exponential is a probability: lse, rounded to fp32, may be
/// far below the logit where both are large. NaN stays NaN.
__device__ inline float at_most_0(float x) {
  float result = 0;
  asm("min.NaN.f32 %0, %1, 0f00000000;" : "=f"(result) : "f"(x));
  return result;
}

/// The base that scores are measured from: the largest, or 0 while there is none, so that -inf is
/// never subtracted from -inf.
__device__ inline float softmax_base(float largest) { return largest == -INFINITY ? 0 : largest; }

struct RowEnd {
  float lse;         // natural log, keys only
  float max_logit;   // natural
  float normalizer;  // by which the sum of exp(logit - max_logit) * value is multiplied
};

/// The results of a row from its largest logit and its `sum` of exp(logit - max_logit). `sink` is a
/// logit too, -inf for none. A sum of 0 means no keys.
__device__ inline RowEnd finish_row(float max_logit, float sum, float sink) {
  if (sum == 0) return {-INFINITY, -INFINITY, 0};
  // A sink whose exponential overflows leaves nothing to the keys.
  return {max_logit + log2f(sum) * kLn2, max_logit, 1 / (sum + expf(sink - max_logit))};
}

}  // namespace winnow::cuda
