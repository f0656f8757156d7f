// SPDX-License-Identifier: Apache-2.0
// The consumer warpgroups of Hopper's index_target.
#pragma once

#include <cstdint>

#include "cuda/hopper/turns.cuh"
#include "cuda/index_loss/index_target_sm90/shared.cuh"

namespace winnow::cuda::target_sm90 {

/// One or two warpgroups with 64 heads each. A single one overlaps products and sums by a second
/// accumulator; two of them, which have no registers for it, take turns at the tensor cores.
template <class T, class Shape>
class Consumer {
 public:
  __device__ Consumer(const Parameters& params, SharedStorage<Shape>& shared)
      : params_(params), shared_(shared), products_(shared.ring) {}

  __device__ void run() {
    if (kTurns && side() == 1) hand_over_tensor_cores(0);
    for (int t = static_cast<int>(blockIdx.x); t < params_.tokens;
         t += static_cast<int>(gridDim.x)) {
      row_ = params_.target + t * params_.target_stride;
      products_.load_query(q_, side());
      const HeadConstants heads(params_.heads, t, side() * kGroupHeads, params_.scale);
      heads.with_probability([&](const auto& term) {
        if constexpr (kTurns) {
          sum_in_turns(term);
        } else {
          sum_overlapped(term);
        }
      });
    }
    // The last hand-over has no other taker.
    if (kTurns && side() == 0) acquire_tensor_cores(0);
  }

 private:
  static constexpr bool kTurns = Shape::kGroups == 2;

  /// A block whose products are complete or under way.
  struct Block {
    float* target;  // of the slot that the calling thread stores, or null
    bool has_key;   // in that slot
    bool is_last;   // of the row
  };

  __device__ static int side() { return static_cast<int>(threadIdx.x) / kWarpgroup; }

  template <class Term>
  __device__ void sum_overlapped(const Term& term) {
    Products even, odd;
    Block block = multiply(even, [](int) {});
    while (!block.is_last) {
      block = sum_during_next(term, even, block, odd);
      if (block.is_last) {
        products_.finish();
        store(sum_of_warp(term, odd), block);
        return;
      }
      block = sum_during_next(term, odd, block, even);
    }
    products_.finish();
    store(sum_of_warp(term, even), block);
  }

  template <class Term>
  __device__ void sum_in_turns(const Term& term) {
    Block block;
    do {
      Products products;
      block = multiply(products, [&](int tile) {
        if (tile == Shape::kTiles - 1) hand_over_tensor_cores(1 - side());
      });
      products_.finish();
      store(sum_of_warp(term, products), block);
    } while (!block.is_last);
  }

  template <class Between>
  __device__ Block multiply(Products& products, const Between& between) {
    const int thread = static_cast<int>(threadIdx.x) % kWarpgroup;
    const BlockInfo& shared_info = shared_.info[products_.stage()];
    Block block;
    const auto begin = [&] {
      const BlockInfo info = broadcast(shared_info);
      const int slot = info.first_slot + thread;
      block.target = thread < kBlock && slot < params_.topk ? row_ + slot : nullptr;
      const std::uint32_t valid = thread / 32 % 2 == 0 ? info.valid[0] : info.valid[1];
      block.has_key = valid >> thread % 32 & 1;
      block.is_last = info.is_last;
      if constexpr (kTurns) acquire_tensor_cores(side());
    };
    // cp.async writes through the generic proxy.
    products_.multiply(q_, products, Hooks{[] { fence_proxy_async(); }, begin, between});
    return block;
  }

  /// Sums a block that is not the last of its row, during the products of the next one.
  template <class Term>
  __device__ Block sum_during_next(const Term& term, const Products& products, const Block& block,
                                   Products& next) {
    using Sum = HeadSum<Term>;
    static_assert(Sum::kSteps <= Shape::kTiles);
    Sum sum(term, products);
    return multiply(next, [&](int tile) {
      if (tile < Sum::kSteps) sum.step(tile);
      if (tile == Shape::kTiles - 1) store(sum.of_warp(), block);
    });
  }

  /// Sums over warps and stores.
  __device__ void store(float2 of_warp, const Block& block) {
    const int thread = static_cast<int>(threadIdx.x);
    const int parity = parity_;
    auto& partial = shared_.partial[parity];
    parity_ ^= 1;
    *reinterpret_cast<float2*>(&partial[thread / 32][thread % 32 * 2]) = of_warp;
    // The last warpgroup waits until the sums of all warps are there. They are overwritten two
    // blocks on, and nobody gets there before it has read them: a single warpgroup because of the
    // next block's barrier, the first of two because the last hands over after its own sums. Blocks
    // take two barriers in turns: the first of two may arrive for a block before all warps of the
    // last have come to the barrier of the block before.
    constexpr int kThreads = Shape::kConsumerThreads;
    if (kTurns && side() == 0) {
      parity == 0 ? arrive_warps<3, kThreads>() : arrive_warps<4, kThreads>();
      return;
    }
    parity == 0 ? sync_warps<3, kThreads>() : sync_warps<4, kThreads>();
    if (block.target == nullptr) return;
    float sum = 0;
#pragma unroll
    for (int warp = 0; warp < Shape::kConsumerWarps; ++warp)
      sum += partial[warp][thread % kWarpgroup];
    if (!params_.adds) {
      *block.target = block.has_key ? sum : 0;
    } else if (block.has_key) {
      *block.target += sum;
    }
  }

  const Parameters& params_;
  SharedStorage<Shape>& shared_;
  BlockProducts<T, Shape> products_;
  Query<Shape::kTiles> q_;
  float* row_;      // of target
  int parity_ = 0;  // of blocks, over all rows: which partial sums are the next block's
};

}  // namespace winnow::cuda::target_sm90
