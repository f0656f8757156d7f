// SPDX-License-Identifier: Apache-2.0
// The general forward kernel's score warps: S = Q K^T, the running softmax, and P. A warp has 16
// heads and all keys of a tile, so that a row's maximum stays within four lanes.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/common/mma.cuh"
#include "cuda/common/softmax.cuh"
#include "cuda/sparse_attention/forward_general/gather.cuh"
#include "cuda/sparse_attention/large_logits.cuh"
#include "cuda/sparse_attention/score_product.cuh"

namespace winnow::cuda::sparse_attention::forward_general {

// By this much a row's base may lag behind its largest score. A score is below 2 log2(e) in log2,
// so that P stays below 2^15, which f16 holds.
inline constexpr float kMaxLag = 5;

template <class Shape>
class ScoreWarp {
 public:
  using T = typename Shape::T;
  using Storage = typename Shape::Storage;

  __device__ ScoreWarp(const ForwardParameters& parameters, Storage& shared,
                       const Tiles<Shape>& tiles, int warp, int lane)
      : parameters_(parameters),
        shared_(shared),
        tiles_(tiles),
        warp_(warp),
        lane_(lane),
        q_(fragment_address(tiles.q + warp * 16 * tiles.row_bytes, tiles.row_bytes,
                            rows_first(lane))),
        steps_(padded_dim(parameters.qk_dim) / 16) {}

  /// Q is there.
  __device__ void load_queries() {
    if (steps_ < kHeld) return;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      load_fragments_at(q_held_.fragments[i], q_ + i * 16 * static_cast<int>(sizeof(T)));
    }
  }

  /// P of a tile, rounded to the type of the inputs, and the factors by which earlier values are
  /// rescaled, to shared memory.
  __device__ void attend(int tile) {
    const std::int32_t key = shared_.key[tiles_.stage_of(tile)][lane_ % Shape::kKeys];
    Scores scores;
    compute_scores(scores, tiles_.rows_of(tile));
    mask(scores, __ballot_sync(kAllLanes, key >= 0));
    move_base(scores, tile % 2);
    store_p(scores, tile % 2);
  }

  /// Writes lse and max_logits, and the normalizers to shared memory.
  __device__ void finish(std::int64_t t, int first_head) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float largest = over_row(largest_[r]);
      sum_[r] += __shfl_xor_sync(kAllLanes, sum_[r], 1);
      sum_[r] += __shfl_xor_sync(kAllLanes, sum_[r], 2);
      if (lane_ % 4 != 0) continue;
      const float factor = exp_of(base_[r] - softmax_base(largest));
      const int h = first_head + row_of_lane(r);
      const bool has_sink = parameters_.sink != nullptr && h < parameters_.heads;
      const RowEnd end = finish_row(largest * parameters_.rest, sum_[r] * factor,
                                    has_sink ? parameters_.sink[h] : -INFINITY);
      const float normalizer = end.normalizer * factor;
      shared_.normalizer[row_of_lane(r)] = is_shared_at_large_logits(end.max_logit, end.normalizer)
                                               ? marked(normalizer)
                                               : normalizer;
      if (h < parameters_.heads) {
        parameters_.lse[t * parameters_.lse_stride + h] = end.lse;
        if (parameters_.max_logits != nullptr) {
          parameters_.max_logits[t * parameters_.max_logits_stride + h] = end.max_logit;
        }
      }
    }
  }

 private:
  static constexpr int kKeyPairs = Shape::kKeys / 16;
  using Scores = float[kKeyPairs * 2][4];
  // Registers suffice for kHeld steps of 16 channels of Q, which is read from shared memory less
  // often then. With 16 heads and wide values it is better to load more steps ahead.
  static constexpr bool kIsWide = Shape::kHeads == 16 && Shape::kPairs > 4;
  static constexpr int kParts = kIsWide ? 4 : 2;
  static constexpr int kHeld = kIsWide ? 0 : Shape::kHeads > 16 ? 16 : 4;

  /// S = Q K^T times the power of two in the scale.
  __device__ void compute_scores(Scores& scores, std::uint32_t rows) const {
    multiply_rows<T, kParts>(scores, q_held_, q_,
                             fragment_address(rows, tiles_.row_bytes, columns_first(lane_)),
                             tiles_.row_bytes, steps_);
#pragma unroll
    for (int n = 0; n < kKeyPairs * 2; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) scores[n][e] *= parameters_.power;
    }
  }

  /// -inf where a slot has no key; a bit of is_key is a slot.
  __device__ void mask(Scores& scores, unsigned is_key) const {
    if (is_key == kAllLanes) return;
    const unsigned own = is_key >> (lane_ % 4 * 2);
#pragma unroll
    for (int n = 0; n < kKeyPairs * 2; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if ((own >> (n * 8 + e % 2) & 1) == 0) scores[n][e] = -INFINITY;
      }
    }
  }

  /// Takes the scores into the maxima and moves the bases that lag too far behind.
  __device__ void move_base(const Scores& scores, int buffer) {
    bool has_passed = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int n = 0; n < kKeyPairs * 2; ++n) {
        largest_[r] = fmaxf(largest_[r], fmaxf(scores[n][r * 2], scores[n][r * 2 + 1]));
      }
      has_passed |= largest_[r] > base_[r] + kMaxLag;
    }
    const bool moves = __any_sync(kAllLanes, has_passed);
    if (lane_ == 0) shared_.moved[buffer][warp_] = moves ? 1 : 0;
    if (!moves) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      // Rows move by their own scores alone: a factor is 1 where no lane of the row has passed.
      const float m = over_row(largest_[r]);
      const float moved = m > base_[r] + kMaxLag ? m : base_[r];
      const float factor = exp_of(base_[r] - softmax_base(moved));
      base_[r] = moved;
      sum_[r] *= factor;
      if (lane_ % 4 == 0) shared_.factor[buffer][row_of_lane(r)] = factor;
    }
  }

  __device__ void store_p(const Scores& scores, int buffer) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float from = softmax_base(base_[r]);
      T* const to = &shared_.p[buffer][row_of_lane(r)][lane_ % 4 * 2];
#pragma unroll
      for (int n = 0; n < kKeyPairs * 2; ++n) {
        const float p0 = exp_of(scores[n][r * 2] - from);
        const float p1 = exp_of(scores[n][r * 2 + 1] - from);
        sum_[r] += p0 + p1;
        *reinterpret_cast<std::uint32_t*>(to + n * 8) = pack<T>(p0, p1);
      }
    }
  }

  /// exp of the logit that a difference of scores is.
  __device__ float exp_of(float difference) const {
    return fast_exp2(difference * parameters_.rest_log2);
  }
  /// The largest of the four lanes that share a row.
  __device__ static float over_row(float x) {
    x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, 1));
    return fmaxf(x, __shfl_xor_sync(kAllLanes, x, 2));
  }
  /// Row r (0: lane / 4, 1: lane / 4 + 8) of this warp among the block's heads.
  __device__ int row_of_lane(int r) const { return warp_ * 16 + r * 8 + lane_ / 4; }

  const ForwardParameters& parameters_;
  Storage& shared_;
  const Tiles<Shape>& tiles_;
  int warp_, lane_;
  std::uint32_t q_;  // this lane's address in Q
  int steps_;
  HeldSteps<kHeld> q_held_;
  float largest_[2] = {-INFINITY, -INFINITY};  // of this lane's scores
  float base_[2] = {-INFINITY, -INFINITY};     // what the four lanes of a row measure scores from
  float sum_[2] = {0, 0};                      // this lane's part
};

}  // namespace winnow::cuda::sparse_attention::forward_general
