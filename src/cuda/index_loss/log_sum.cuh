// SPDX-License-Identifier: Apache-2.0
// The running log-sum-exp of dense_index_loss.
#pragma once

#include <cmath>

#include "cuda/common/softmax.cuh"

namespace winnow::cuda {

/// A sum of exp(s), represented as sum * exp(base(largest)). It propagates NaN and infinities.
struct LogSum {
  float largest = -INFINITY;
  float sum = 0;

  __device__ static float base(float largest) { return isinf(largest) ? 0 : largest; }

  /// Rescales the sum to a largest logit that is no smaller.
  __device__ void raise(float new_largest) {
    if (largest != new_largest) {
      sum *= largest == -INFINITY ? 0 : fast_exp2((base(largest) - base(new_largest)) * kLog2E);
    }
    largest = new_largest;
  }
  __device__ void add(float s) { sum += fast_exp2((s - base(largest)) * kLog2E); }
  __device__ void add(LogSum other) {
    const float both = fmaxf(largest, other.largest);
    raise(both);
    other.raise(both);
    sum += other.sum;
  }
  /// Adds the sum of the lane whose number differs by lane_mask; both lanes get the result.
  __device__ void add_lane(int lane_mask) {
    LogSum other;
    other.largest = __shfl_xor_sync(0xffffffffu, largest, lane_mask);
    other.sum = __shfl_xor_sync(0xffffffffu, sum, lane_mask);
    add(other);
  }
  /// The log of the sum.
  __device__ float lse() const { return base(largest) + log2f(sum) * kLn2; }
};

}  // namespace winnow::cuda
