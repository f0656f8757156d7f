// SPDX-License-Identifier: Apache-2.0
// The consumer warpgroups over windows: one row of a pair each.
#pragma once

#include <cstdint>

#include "cuda/hopper/turns.cuh"
#include "cuda/index_loss/log_sum.cuh"
#include "cuda/index_loss/window_sums_sm90/shared.cuh"

namespace winnow::cuda::window_sm90 {

__device__ inline int side() { return static_cast<int>(threadIdx.x) / kWarpgroup; }

/// Where the sums over heads of a row's keys go.
class RowSums {
 public:
  template <class Shape>
  __device__ RowSums(const Parameters& params, SharedStorage<Shape>& shared, std::int64_t t,
                     int begin, int end)
      : partial_(shared.partial[side()]),
        row_(params.sums + t * params.sums_stride),
        begin_(begin),
        end_(end),
        adds_(params.adds) {}

  /// Sums over warps and stores.
  __device__ void store(float2 of_warp, int first_key) {
    const int thread = static_cast<int>(threadIdx.x) % kWarpgroup;
    auto& partial = partial_[parity_];
    parity_ ^= 1;
    *reinterpret_cast<float2*>(&partial[thread / 32][thread % 32 * 2]) = of_warp;
    // The sums of all warps are there. They are overwritten two blocks on, and nobody gets there
    // before all have read them and come to the next block's barrier.
    sync_side();
    const int key = first_key + thread;
    if (thread >= kBlock || key < begin_ || key >= end_) return;
    float sum = 0;
#pragma unroll
    for (int warp = 0; warp < kGroupWarps; ++warp) sum += partial[warp][thread];
    float& target = row_[key - begin_];
    target = adds_ ? target + sum : sum;
  }

  /// The next row's sums overwrite this one's.
  __device__ void finish() { sync_side(); }

 private:
  __device__ static void sync_side() {
    if (side() == 0) {
      sync_warps<3, kWarpgroup>();
    } else {
      sync_warps<4, kWarpgroup>();
    }
  }

  float (&partial_)[2][kGroupWarps][kBlock];
  float* row_;
  int begin_, end_;
  int parity_ = 0;  // of blocks: which partial sums are the next one's
  bool adds_;
};

/// Sums the probabilities of a row's keys.
class TargetOfRow {
 public:
  template <class Shape>
  __device__ TargetOfRow(const Parameters& params, SharedStorage<Shape>& shared, std::int64_t t,
                         int begin, int end)
      : sums_(params, shared, t, begin, end), heads_(params.heads, t, 0, params.scale) {}

  __device__ void add(const Products& products, int first_key) {
    heads_.with_probability(
        [&](const auto& term) { sums_.store(sum_of_warp(term, products), first_key); });
  }
  __device__ void finish() { sums_.finish(); }

 private:
  RowSums sums_;
  HeadConstants heads_;
};

/// Sums the weighted positive parts of the indexer's products: the scores of a row's keys.
class ScoresOfRow {
 public:
  template <class Shape>
  __device__ ScoresOfRow(const Parameters& params, SharedStorage<Shape>& shared, std::int64_t t,
                         int begin, int end)
      : sums_(params, shared, t, begin, end) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int h = head_of_lane(half);
      term_.is_there[half] = h < params.heads.count;
      term_.weight[half] =
          term_.is_there[half] ? __ldg(params.weights + t * params.weights_stride + h) : 0;
    }
  }

  __device__ void add(const Products& products, int first_key) {
    sums_.store(sum_of_warp(term_, products), first_key);
  }
  __device__ void finish() { sums_.finish(); }

 private:
  struct Term {
    float weight[2];
    bool is_there[2];

    /// max keeps NaN; zeros in place of a head times an infinite key would be one.
    __device__ float operator()(float product, int half) const {
      const float part = weight[half] * (product < 0 ? 0 : product);
      return is_there[half] ? part : 0;
    }
  };

  RowSums sums_;
  Term term_;
};

/// Computes the lse of a row's heads.
class LseOfRow {
 public:
  template <class Shape>
  __device__ LseOfRow(const Parameters& params, SharedStorage<Shape>&, std::int64_t t, int begin,
                      int end)
      : params_(params), row_(params.lse + t * params.heads.lse_stride), begin_(begin), end_(end) {}

  __device__ void add(Products& products, int first_key) {
    const int first_column = first_key + static_cast<int>(threadIdx.x) % 4 * 2;
    const bool is_whole = first_key >= begin_ && first_key + kBlock <= end_;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float largest = sums_[half].largest;
#pragma unroll
      for (int i = 0; i < kBlock / 8; ++i) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int key = first_column + 8 * i + j;
          float& s = products[4 * i + 2 * half + j];
          s = __fmul_rn(s, params_.scale);  // not fused with the difference, so the largest is 0
          if (!is_whole && (key < begin_ || key >= end_)) s = -INFINITY;
          largest = fmaxf(largest, s);
        }
      }
      sums_[half].raise(largest);
#pragma unroll
      for (int i = 0; i < kBlock / 4; ++i) {
        sums_[half].add(products[4 * (i / 2) + 2 * half + i % 2]);
      }
    }
  }

  __device__ void finish() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sums_[half].add_lane(1);
      sums_[half].add_lane(2);
      const int h = head_of_lane(half);
      if (threadIdx.x % 4 == 0 && h < params_.heads.count) row_[h] = sums_[half].lse();
    }
  }

 private:
  const Parameters& params_;
  float* row_;
  int begin_, end_;
  LogSum sums_[2];  // over the lane's keys
};

/// Multiplies every gridDim.x-th pair of rows by the keys of their windows, and gives the products
/// of each block to a Row.
template <class T, class Shape, class Row>
__device__ void consume(const Parameters& params, SharedStorage<Shape>& shared) {
  const int own = side();
  BlockProducts<T, Shape> block_products(shared.ring);
  if (own == 1) hand_over_tensor_cores(0);
  for (int item = static_cast<int>(blockIdx.x); item < params.items;
       item += static_cast<int>(gridDim.x)) {
    const WindowPair windows(params, item);
    const int t = WindowPair::first_row(params, item) + own;
    const bool is_there = t < params.tokens;
    Query<Shape::kTiles> q;
    block_products.load_query(q, own);
    Row row(params, shared, is_there ? t : 0, own == 0 ? windows.begin[0] : windows.begin[1],
            own == 0 ? windows.end[0] : windows.end[1]);
    windows.for_each_block([&](int key) {
      Products products;
      block_products.multiply(q, products,
                              Hooks{[] {}, [&] { acquire_tensor_cores(own); },
                                    [&](int tile) {
                                      if (tile == Shape::kTiles - 1)
                                        hand_over_tensor_cores(1 - own);
                                    }});
      block_products.finish();
      row.add(products, key);
    });
    if (is_there) row.finish();
  }
  if (own == 0) acquire_tensor_cores(0);  // the last hand-over has no other taker
}

}  // namespace winnow::cuda::window_sm90
