// SPDX-License-Identifier: Apache-2.0
// The online softmax of warpgroup 0.
#pragma once

#include <cstdint>

#include "cuda/hopper/quad.cuh"
#include "cuda/sparse_attention/forward_sm90/shared.cuh"

namespace winnow::cuda::sparse_attention::forward_sm90 {

using Scores = float[kBlock / 2];  // the accumulator of S of one block

/// Turns S of a block into P, which goes to the last tile of its stage, and updates the running
/// maxima and sums. It is cut into steps, so that the products of the next block can be issued
/// between them. One warp of each scheduler does all of this, so every instruction counts.
template <class T>
class Softmax {
 public:
  static constexpr int kSteps = 3 + kBlock / 8;

  __device__ Softmax(const ForwardParameters& params, Scores& s, RowState (&state)[2],
                     SharedStorage& shared, int stage)
      : power_(params.power),
        rest_log2_(params.rest_log2),
        scale_log2_(params.scale_log2),
        s_(s),
        state_(state),
        shared_(shared),
        info_(shared.info[stage]),
        stage_(stage) {
    const int row = row_of_lane();
    p_ = shared_address(shared.stages[stage]) + (kStageTiles - 1) * kTileBytes +
         slice_offset(row, 0) + 4 * (lane() % 4);
  }

  __device__ void step(int i) {
    if (i == 0) {
      if (info_.valid[0] != kAllValid || info_.valid[1] != kAllValid) mask();
    } else if (i == 1) {
      move_maxima();
    } else if (i < kSteps - 1) {
      exponentiate(i - 2);
    } else {
      finish();
    }
  }

 private:
  static constexpr std::uint32_t kAllValid = (std::uint32_t{1} << (kBlock / 2)) - 1;
  __device__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }
  __device__ static int row_of_lane() {
    return static_cast<int>(threadIdx.x) / 32 * 16 + lane() / 4;
  }  // and 8 more

  /// Sets the scores of slots without a key to -inf.
  __device__ void mask() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const std::uint32_t bits = info_.valid[half] >> (2 * (lane() % 4));
#pragma unroll
      for (int i = 0; i < kBlock / 4; ++i) {
        if (!((bits >> (8 * (i / 4) + i % 2)) & 1)) s_[kBlock / 4 * half + i] = -INFINITY;
      }
    }
  }

  /// Does what move_maximum does; calling that costs registers, which spill here.
  __device__ void move_maxima() {
    float largest[2] = {s_[0], s_[2]};
#pragma unroll
    for (int i = 0; i < kBlock / 8; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        largest[half] = fmaxf(largest[half], fmaxf(s_[4 * i + 2 * half], s_[4 * i + 2 * half + 1]));
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      RowState& row = state_[half];
      largest[half] = quad_max(largest[half]);  // scale > 0
      row.largest = fmaxf(row.largest, largest[half]);
      // By which the logit rises, in log2; infinite where there was no key before. The products
      // times a power of two are exact, and differences of them cannot overflow.
      const float rise = fmaf(-row.maximum, power_, largest[half] * power_) * rest_log2_;
      const bool moves = rise > kLazyMaximum;
      rescale_[half] = moves ? fast_exp2(-rise) : 1.0f;
      row.maximum = moves ? largest[half] : row.maximum;
      row.sum *= rescale_[half];
      subtrahend_[half] = row.maximum == -INFINITY ? 0.0f : row.maximum * scale_log2_;
    }
    // The products between the steps ask for a warp that does not diverge.
    const float larger = fmaxf(fabsf(subtrahend_[0]), fabsf(subtrahend_[1]));
    if (__any_sync(0xffffffffu, larger > kMaxSubtrahend)) subtract_maxima();
  }

  /// Subtracts maxima whose logits are large from the products themselves, where close ones have an
  /// exact difference: rounded, the logit of the maximum is off by more than the exponentials bear.
  __device__ void subtract_maxima() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool is_large = fabsf(subtrahend_[half]) > kMaxSubtrahend;
      const float maximum = is_large ? state_[half].maximum : 0.0f;
      if (is_large) subtrahend_[half] = 0;
#pragma unroll
      for (int i = 0; i < kBlock / 8; ++i) {
        s_[4 * i + 2 * half] -= maximum;
        s_[4 * i + 2 * half + 1] -= maximum;
      }
    }
  }

  /// Computes eight columns of P.
  __device__ void exponentiate(int i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float low = fast_exp2(fmaf(s_[4 * i + 2 * half], scale_log2_, -subtrahend_[half]));
      const float high = fast_exp2(fmaf(s_[4 * i + 2 * half + 1], scale_log2_, -subtrahend_[half]));
      state_[half].sum += low + high;
      const std::uint32_t target =
          (i % 2 == 0 ? p_ : p_ ^ 16) + i / 2 * kSliceBytes + half * 8 * 32;
      asm volatile("st.shared.b32 [%0], %1;" ::"r"(target), "r"(pack<T>(low, high)) : "memory");
    }
  }

  /// Tells warpgroups 1 and 2 whether and how to rescale out so far.
  __device__ void finish() {
    const bool rescales = __any_sync(0xffffffffu, rescale_[0] != 1 || rescale_[1] != 1);
    if (lane() == 0) shared_.rescales[stage_][threadIdx.x / 32] = rescales;
    if (rescales && lane() % 4 == 0) {
      shared_.rescale[stage_][row_of_lane()] = rescale_[0];
      shared_.rescale[stage_][row_of_lane() + 8] = rescale_[1];
    }
  }

  // Copies of parameters: these would be loaded anew after every asm on memory, and spill
  // registers.
  float power_, rest_log2_, scale_log2_;
  Scores& s_;
  RowState (&state_)[2];
  SharedStorage& shared_;
  BlockInfo info_;
  int stage_;
  std::uint32_t p_;  // the address of this lane's first words of P
  float rescale_[2];
  float subtrahend_[2];
};

}  // namespace winnow::cuda::sparse_attention::forward_sm90
