// SPDX-License-Identifier: Apache-2.0
// The probability of a key from the lse of attention.
#pragma once

#include <cfloat>
#include <cmath>

#include "cuda/common/softmax.cuh"

namespace winnow::cuda {

/// L = log(exp(lse) + exp(sink)), NaN if either is. It is finite instead of -inf, so that
/// `probability` never subtracts -inf from -inf: a logit of -inf has probability 0, any other 1.
__device__ inline float log_sum_of_head(float lse, float sink) {
  if (isnan(sink)) return sink;
  const float larger = lse < sink ? sink : lse;
  if (larger == -INFINITY) return -FLT_MAX;
  if (isinf(larger)) return larger;
  return larger + log1pf(expf((sink < lse ? sink : lse) - larger));
}

/// exp(scale * product - L). The logit is rounded as in the lse of attention, so that of the
/// largest one next to nothing remains where both are large.
__device__ inline float probability(float product, float scale, float log_sum) {
  const float logit = __fmul_rn(product, scale);  // not fused with the difference
  return fast_exp2(at_most_0((logit - log_sum) * kLog2E));
}

}  // namespace winnow::cuda
