// SPDX-License-Identifier: Apache-2.0
// The consumer warpgroups: products of 64 heads with the keys of a block, exponentials, the sum
// over heads.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/hopper/fragments.cuh"
#include "cuda/index_loss/index_target_sm90/shared.cuh"
#include "cuda/index_loss/probability.cuh"

namespace winnow::cuda::target_sm90 {

using Products = float[kBlock / 2];  // the accumulator of a block: 64 heads x 64 keys

/// The two heads of whose products the calling lane holds parts.
__device__ inline int head_of_lane(int half) {
  return static_cast<int>(threadIdx.x) / 32 * 16 + static_cast<int>(threadIdx.x) % 32 / 4 +
         8 * half;
}

/// A row's heads as a lane holds them: Q, and of two heads the lse.
template <class T, int kTiles>
struct Query {
  RowFragments<kTiles> q;
  float lse[2];

  __device__ void load(const Parameters& params, int t) {
    const void* rows[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool is_there = head_of_lane(half) < params.heads;
      rows[half] = is_there ? static_cast<const T*>(params.q) + t * params.q_token_stride +
                                  head_of_lane(half) * params.q_head_stride
                            : nullptr;
      lse[half] = is_there ? __ldg(params.lse + t * params.lse_stride + head_of_lane(half)) : 0;
    }
    q.load(rows);
    q.arrange();
  }
};

/// Of each of the lane's two heads: L, and whether there is such a head.
struct HeadConstants {
  float log_sum[2];
  bool is_there[2];
};

/// A block whose products are complete or under way.
struct Block {
  float* target;  // of the slot that the calling thread stores, or null
  bool has_key;   // in that slot
  bool is_last;   // of the row
};

/// Multiplies the heads by the next block of keys. After the products of each chunk are issued it
/// calls between(chunk), which the tensor cores overlap.
template <class T, class Shape, class Between>
__device__ inline Block multiply_block(const Parameters& params, SharedStorage<Shape>& shared,
                                       const Query<T, Shape::kTiles>& query, int t,
                                       Products& products, PipelineState& state,
                                       const Between& between) {
  const int thread = static_cast<int>(threadIdx.x);
  const std::uint32_t stage = shared_address(shared.stages[state.stage]);
  const auto release = [&](int chunk) {
    if (thread % 32 == 0) shared.free[state.stage][chunk].arrive();
  };
  Block block;
#pragma unroll
  for (int chunk = 0; chunk < Shape::kChunks; ++chunk) {
    shared.full[state.stage][chunk].wait(state.phase);
    if (chunk == 0) {
      const BlockInfo& info = shared.info[state.stage];
      const int slot = info.first_slot + thread;
      const bool stores = thread < kBlock && slot < params.topk;
      block.target = stores ? params.target + t * params.target_stride + slot : nullptr;
      block.has_key = info.valid[thread / 32 % 2] >> thread % 32 & 1;
      block.is_last = info.is_last;
      __syncwarp();  // the warp has read info: lane 0 may free the chunk
    }
    fence_proxy_async();
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < Shape::kChunkTiles; ++i) {
      const int tile = chunk * Shape::kChunkTiles + i;
      const std::uint64_t keys = k_major(stage + tile * kTileBytes);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        multiply_64x64x16<T>(products, query.q.words[4 * tile + j], keys + j * kNextKMajor,
                             tile > 0 || j > 0);
      }
    }
    wgmma_commit();
    if (chunk > 0) {
      wgmma_wait<1>();
      release(chunk - 1);
    }
    between(chunk);
  }
  wgmma_wait<0>();
  release(Shape::kChunks - 1);
  state.next();
  return block;
}

/// Turns the products of a block into sums over heads, in as many steps as a stage has chunks.
template <class Shape>
class HeadSum {
 public:
  using Partial = float[Shape::kConsumerWarps][kBlock];  // sums over the heads of each warp

  __device__ HeadSum(const Parameters& params, Partial& partial, const HeadConstants& heads,
                     const Products& products, const Block& block)
      : scale_(params.scale),
        adds_(params.adds),
        partial_(partial),
        heads_(heads),
        products_(products),
        block_(block) {}

  __device__ void step(int chunk) {
    constexpr int kStepColumns = (kColumns + Shape::kChunks - 1) / Shape::kChunks;
#pragma unroll
    for (int k = 0; k < kStepColumns; ++k) {
      const int i = chunk * kStepColumns + k;
      if (i >= kColumns) break;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        sums_[2 * i + j] = term(4 * i + j, 0) + term(4 * i + 2 + j, 1);
      }
    }
    if (chunk == Shape::kChunks - 1) finish();
  }

 private:
  static constexpr int kColumns = kBlock / 8;  // of which a lane has a pair each

  /// Zeros in place of a head times an infinite key would be NaN.
  __device__ float term(int i, int half) const {
    const float p = probability(products_[i], scale_, heads_.log_sum[half]);
    return heads_.is_there[half] ? p : 0;
  }

  /// Of the first 2 * kHalf sums, adds one half to those of the lane that is 2 * kHalf away, which
  /// keeps the other.
  template <int kHalf>
  __device__ void fold() {
    const bool is_high = threadIdx.x & (2 * kHalf);
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      const float sent = is_high ? sums_[i] : sums_[i + kHalf];
      const float kept = is_high ? sums_[i + kHalf] : sums_[i];
      sums_[i] = kept + __shfl_xor_sync(0xffffffffu, sent, 2 * kHalf);
    }
  }

  /// Sums over the eight lanes that hold the same keys, so that lane l has keys 2 l and 2 l + 1,
  /// then over warps.
  __device__ void finish() {
    const int thread = static_cast<int>(threadIdx.x);
    fold<8>();
    fold<4>();
    fold<2>();
    *reinterpret_cast<float2*>(&partial_[thread / 32][thread % 32 * 2]) = {sums_[0], sums_[1]};
    // The sums of all warps are there. They are overwritten two blocks on, and nobody gets there
    // before all have read them and come to the next block's barrier.
    sync_warps<1, Shape::kConsumerThreads>();
    if (block_.target == nullptr) return;
    float sum = 0;
#pragma unroll
    for (int warp = 0; warp < Shape::kConsumerWarps; ++warp) sum += partial_[warp][thread];
    if (!adds_) {
      *block_.target = block_.has_key ? sum : 0;
    } else if (block_.has_key) {
      *block_.target += sum;
    }
  }

  float scale_;
  bool adds_;
  Partial& partial_;
  HeadConstants heads_;
  const Products& products_;
  Block block_;
  float sums_[kBlock / 4];
};

/// Sums a block that is not the last of its row, during the products of the next one.
template <class T, class Shape>
__device__ inline Block sum_during_next(const Parameters& params, SharedStorage<Shape>& shared,
                                        const Query<T, Shape::kTiles>& query,
                                        const HeadConstants& heads, int t, const Products& products,
                                        const Block& block, int& parity, Products& next,
                                        PipelineState& state) {
  HeadSum<Shape> sum(params, shared.partial[parity], heads, products, block);
  parity ^= 1;
  return multiply_block<T, Shape>(params, shared, query, t, next, state,
                                  [&](int chunk) { sum.step(chunk); });
}

/// Sums a block whose products nothing overlaps.
template <class Shape>
__device__ inline void sum_block(const Parameters& params, SharedStorage<Shape>& shared,
                                 const HeadConstants& heads, const Products& products,
                                 const Block& block, int& parity) {
  HeadSum<Shape> sum(params, shared.partial[parity], heads, products, block);
  parity ^= 1;
#pragma unroll
  for (int chunk = 0; chunk < Shape::kChunks; ++chunk) sum.step(chunk);
}

/// Computes the target of one row. A single warpgroup overlaps products and sums by a second
/// accumulator; two of them, which have no registers for it, by each other.
template <class T, class Shape>
__device__ inline void consume_row(const Parameters& params, SharedStorage<Shape>& shared,
                                   const Query<T, Shape::kTiles>& query, const HeadConstants& heads,
                                   int t, int& parity, PipelineState& state) {
  const auto nothing = [](int) {};
  Products even;
  Block block = multiply_block<T, Shape>(params, shared, query, t, even, state, nothing);
  if constexpr (Shape::kGroups == 1) {
    Products odd;
    while (!block.is_last) {
      block = sum_during_next<T, Shape>(params, shared, query, heads, t, even, block, parity, odd,
                                        state);
      if (block.is_last) {
        sum_block(params, shared, heads, odd, block, parity);
        return;
      }
      block = sum_during_next<T, Shape>(params, shared, query, heads, t, odd, block, parity, even,
                                        state);
    }
  } else {
    while (!block.is_last) {
      sum_block(params, shared, heads, even, block, parity);
      block = multiply_block<T, Shape>(params, shared, query, t, even, state, nothing);
    }
  }
  sum_block(params, shared, heads, even, block, parity);
}

/// Computes the target of every gridDim.x-th row.
template <class T, class Shape>
__device__ void consume(const Parameters& params, SharedStorage<Shape>& shared) {
  float sink[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int h = head_of_lane(half);
    sink[half] = params.sink != nullptr && h < params.heads ? params.sink[h] : -INFINITY;
  }
  PipelineState state;
  int parity = 0;  // of blocks, over all rows: which partial sums are the next block's
  Query<T, Shape::kTiles> query;
  for (int t = static_cast<int>(blockIdx.x); t < params.tokens; t += static_cast<int>(gridDim.x)) {
    // Blocks of keys wait in the ring meanwhile; registers for both rows' Q there are not.
    query.load(params, t);
    const HeadConstants heads{
        {log_sum_of_head(query.lse[0], sink[0]), log_sum_of_head(query.lse[1], sink[1])},
        {head_of_lane(0) < params.heads, head_of_lane(1) < params.heads}};
    consume_row<T, Shape>(params, shared, query, heads, t, parity, state);
  }
}

}  // namespace winnow::cuda::target_sm90
