// SPDX-License-Identifier: Apache-2.0
// What a consumer warpgroup does with the keys of a block: products of 64 heads, their
// probabilities, and the sum of these over the heads of a warp.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/common/mma.cuh"
#include "cuda/index_loss/probability.cuh"
#include "cuda/index_loss/sm90/ring.cuh"

namespace winnow::cuda::target_sm90 {

/// The heads of a pass: their part in the softmax of every row.
struct Heads {
  const float* lse = nullptr;   // [tokens, heads], natural
  const float* sink = nullptr;  // [heads], or null
  std::int64_t lse_stride = 0;
  std::int32_t count = 0;
};

using Products = float[kBlock / 2];  // the accumulator of a block: 64 heads x 64 keys

/// The two of 64 heads of whose products the calling lane holds parts.
__device__ inline int head_of_lane(int half) {
  return static_cast<int>(threadIdx.x) % kWarpgroup / 32 * 16 +
         static_cast<int>(threadIdx.x) % 32 / 4 + 8 * half;
}

/// Q of 64 heads, the first operand of every product.
template <int kTiles>
using Query = std::uint32_t[kTiles * 4][4];  // per 16 channels

/// What a kernel does while a block is multiplied.
///   landed()       A chunk has landed, before its first product.
///   begin()        The first chunk has landed.
///   between(tile)  The products of a tile are issued, and those of the block before are complete.
///                  Issuing a product waits for room in the queue of the tensor cores, and other
///                  work can fill that time.
template <class Landed, class Begin, class Between>
struct Hooks {
  Landed landed;
  Begin begin;
  Between between;
};

/// The products of one warpgroup, block after block. Those of a block complete during the next one,
/// so that the tensor cores do not idle between blocks.
template <class T, class Shape>
class BlockProducts {
 public:
  __device__ explicit BlockProducts(KeyRing<Shape>& ring) : ring_(ring) {}

  /// The stage of the next block.
  __device__ int stage() const { return state_.stage; }

  /// Loads Q, which comes through the ring too: a block of 64 heads for each group, the calling
  /// warpgroup's is number `group`. The products of the row before are complete.
  __device__ void load_query(Query<Shape::kTiles>& q, int group) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const BlockOffset offset = rows_first(lane);
    const int row = static_cast<int>(threadIdx.x) % kWarpgroup / 32 * 16 + offset.row;
#pragma unroll
    for (int block = 0; block < Shape::kGroups; ++block) {
      const std::byte* const stage = ring_.stages[state_.stage];
      for (int chunk = 0; chunk < Shape::kChunks; ++chunk) {
        ring_.full[state_.stage][chunk].wait(state_.phase);
      }
      if (block == group) {
#pragma unroll
        for (int i = 0; i < Shape::kTiles * 4; ++i) {
          load_fragments(
              q[i], stage + i / 4 * kTileBytes + tile_offset(row, i % 4 * 2 + offset.column / 8));
        }
      }
      wait_for_own_loads();
      __syncwarp();  // lane 0 frees chunks for all lanes
      // Each lane frees for itself the chunk that is refilled first: racecheck does not follow one
      // lane that does it for its warp. Lane 0 suffices for the others.
      ring_.free[state_.stage][0].arrive();
      for (int chunk = 1; chunk < Shape::kChunks; ++chunk) {
        if (lane == 0) ring_.free[state_.stage][chunk].arrive(32);
      }
      state_.next();
    }
  }

  /// Issues the products of the heads and the next block of keys.
  template <class... Hook>
  __device__ void multiply(const Query<Shape::kTiles>& q, Products& products,
                           const Hooks<Hook...>& hooks) {
    const std::uint32_t stage = shared_address(ring_.stages[state_.stage]);
#pragma unroll
    for (int tile = 0; tile < Shape::kTiles; ++tile) {
      const int chunk = tile / Shape::kChunkTiles;
      const bool is_first = tile % Shape::kChunkTiles == 0;
      if (is_first) {
        ring_.full[state_.stage][chunk].wait(state_.phase);
        if (chunk == 0) hooks.begin();
        hooks.landed();
        wgmma_fence();
      }
      const std::uint64_t keys = k_major(stage + tile * kTileBytes);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        multiply_64x64x16<T, 0>(products, q[4 * tile + i], keys + i * kNextKMajor,
                                tile > 0 || i > 0);
      }
      wgmma_commit();
      if (is_first) {
        wgmma_wait<1>();  // for all tiles before this one
        release();
        pending_ = &ring_.free[state_.stage][chunk];
      }
      hooks.between(tile);
    }
    state_.next();
  }

  /// Waits for all products.
  __device__ void finish() {
    wgmma_wait<0>();
    release();
    pending_ = nullptr;
  }

 private:
  /// Lane 0 frees for its warp what wgmma has read.
  __device__ void release() {
    if (pending_ != nullptr && threadIdx.x % 32 == 0) pending_->arrive(32);
  }

  KeyRing<Shape>& ring_;
  PipelineState state_;
  Barrier* pending_ = nullptr;  // `free` of the chunk whose products are under way
};

// The largest |L| (log2) up to which an exponent is one fma of product, scale and L. L is rounded
// by 2^-24 of itself, which costs a probability at most 2^-14 of its value.
inline constexpr float kMaxSubtrahend = 1024;

/// exp(scale * product - L) of the lane's two heads, all of which are there and have an L within
/// that limit.
struct PlainProbability {
  float scale_log2;
  float log2_sum[2];

  __device__ float operator()(float product, int half) const {
    return fast_exp2(at_most_0(fmaf(product, scale_log2, -log2_sum[half])));
  }
};

/// The same of any heads.
struct AnyProbability {
  float scale;
  float log_sum[2];
  bool is_there[2];

  __device__ float operator()(float product, int half) const {
    const float p = probability(product, scale, log_sum[half]);
    return is_there[half] ? p : 0;  // zeros in place of a head times an infinite key would be NaN
  }
};

/// The constants of 64 heads.
class HeadConstants {
 public:
  __device__ HeadConstants(const Heads& heads, std::int64_t t, int first_head, float scale)
      : scale_(scale) {
    const auto log_sum_of = [&](int h) {
      const float sink = heads.sink != nullptr ? __ldg(heads.sink + h) : -INFINITY;
      return log_sum_of_head(__ldg(heads.lse + t * heads.lse_stride + h), sink);
    };
    bool is_plain = first_head + kGroupHeads <= heads.count && isfinite(scale * kLog2E);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int h = first_head + head_of_lane(half);
      is_there_[half] = h < heads.count;
      log_sum_[half] = is_there_[half] ? log_sum_of(h) : 0;
      // Every warp looks at all heads: the whole warpgroup must take the same way.
      const int other = first_head + static_cast<int>(threadIdx.x) % 32 + 32 * half;
      is_plain = is_plain && fabsf(log_sum_of(other)) * kLog2E <= kMaxSubtrahend;
    }
    is_plain_ = __all_sync(0xffffffffu, is_plain);
  }

  /// Calls function(probability), with the faster form if it serves.
  template <class Function>
  __device__ void with_probability(const Function& function) const {
    if (is_plain_) {
      function(PlainProbability{scale_ * kLog2E, {log_sum_[0] * kLog2E, log_sum_[1] * kLog2E}});
    } else {
      function(AnyProbability{scale_, {log_sum_[0], log_sum_[1]}, {is_there_[0], is_there_[1]}});
    }
  }

 private:
  float scale_;
  float log_sum_[2];
  bool is_there_[2];
  bool is_plain_;
};

/// Sums a term of the products of a block over the heads of a warp, eight columns a step.
template <class Term>
class HeadSum {
 public:
  static constexpr int kSteps = kBlock / 8;

  __device__ HeadSum(const Term& term, const Products& products)
      : term_(term), products_(products) {}

  /// Columns that are added to each other's lanes follow one another: their shuffles keep the
  /// compiler from moving all terms behind the last product.
  __device__ void step(int i) {
    const int column = i / 2 + i % 2 * (kSteps / 2);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      sums_[2 * column + j] =
          term_(products_[4 * column + j], 0) + term_(products_[4 * column + 2 + j], 1);
    }
    if (i % 2 == 0) return;
#pragma unroll
    for (int j = 0; j < 2; ++j) fold<kSteps>(2 * (i / 2) + j);
  }

  /// After the last step: the sums of keys 2 l and 2 l + 1, l being the calling lane.
  __device__ float2 of_warp() {
#pragma unroll
    for (int i = 0; i < 4; ++i) fold<4>(i);
#pragma unroll
    for (int i = 0; i < 2; ++i) fold<2>(i);
    return {sums_[0], sums_[1]};
  }

 private:
  /// Adds one of sums i and i + kHalf to that of the lane which is 2 * kHalf away and keeps the
  /// other; the result is sum i.
  template <int kHalf>
  __device__ void fold(int i) {
    const bool is_high = threadIdx.x & (2 * kHalf);
    const float sent = is_high ? sums_[i] : sums_[i + kHalf];
    const float kept = is_high ? sums_[i + kHalf] : sums_[i];
    sums_[i] = kept + __shfl_xor_sync(0xffffffffu, sent, 2 * kHalf);
  }

  Term term_;
  const Products& products_;
  float sums_[kBlock / 4];
};

/// All steps at once.
template <class Term>
__device__ inline float2 sum_of_warp(const Term& term, const Products& products) {
  HeadSum<Term> sum(term, products);
#pragma unroll
  for (int i = 0; i < HeadSum<Term>::kSteps; ++i) sum.step(i);
  return sum.of_warp();
}

}  // namespace winnow::cuda::target_sm90
