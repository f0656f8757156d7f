// SPDX-License-Identifier: Apache-2.0
// Powers of two that keep the factors of a row's gradients within the range of f16.
#pragma once

#include <cmath>

namespace winnow::cuda {

/// Powers of two that bring the largest factors of a row into [1, 2).
struct RowScale {
  float d_score = 1;  // by which d_scores are multiplied
  float weight = 1;   // by which weights are divided
};

__device__ inline float power_of_two_below(float x) {
  return x == 0 ? 1 : ldexpf(1, max(-100, min(100, ilogbf(x))));
}

/// |x| where it is finite, else 0.
__device__ inline float finite_magnitude(float x) { return fabsf(x) < INFINITY ? fabsf(x) : 0; }

/// factor * sum; an empty sum stays 0 whatever the factor is.
__device__ inline float scaled(float sum, float factor) { return sum == 0 ? 0 : sum * factor; }

}  // namespace winnow::cuda
