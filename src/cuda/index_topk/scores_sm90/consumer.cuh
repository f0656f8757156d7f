// SPDX-License-Identifier: Apache-2.0
// The two consumer warpgroups of index_topk's scores on sm_90: products, relu, weights and the sum
// over heads.
#pragma once

#include <cstdint>

#include "cuda/hopper/turns.cuh"
#include "cuda/index_topk/parameters.cuh"
#include "cuda/index_topk/scores_sm90/shared.cuh"

namespace winnow::cuda::index_topk::sm90 {

/// Loads the weights of the columns that a lane holds: 8 i + 2 (lane % 4) and the next.
__device__ inline void load_weights(float (&weights)[kColumns / 4], const float (&from)[kColumns]) {
#pragma unroll
  for (int i = 0; i < kColumns / 8; ++i) {
    const float2 pair = *reinterpret_cast<const float2*>(&from[8 * i + threadIdx.x % 4 * 2]);
    weights[2 * i] = pair.x;
    weights[2 * i + 1] = pair.y;
  }
}

template <int kHeads>
inline constexpr int kLaneQueries = kColumns / kHeads / 4;  // that a lane holds

/// Where a lane stores what it has of the next tile.
template <int kHeads>
struct Targets {
  float* scores[kLaneQueries<kHeads>];
  float* sample[kLaneQueries<kHeads>];
};

/// Stores sum_h weights * max(products, 0) of this warp's 16 keys and all queries, and the sample
/// of them. kPadded: there are fewer than kHeads heads; columns without a head are left out,
/// because their zeros times an infinite key would be NaN.
template <int kHeads, bool kPadded>
__device__ void store_scores(float (&products)[128], const float (&weights)[kColumns / 4],
                             const float (&scale)[2], int heads, const Sampled& sampled,
                             Targets<kHeads>& to) {
  float sums[2][2] = {};  // [neighbouring columns][key rows lane / 4 and lane / 4 + 8]
#pragma unroll
  for (int i = 0; i < kColumns / 8; ++i) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      if (kPadded && !Column<kHeads>(8 * i + j).has_head(heads)) continue;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float product = positive_part(products[4 * i + 2 * half + j]);
        sums[j][half] = fmaf(weights[2 * i + j], product, sums[j][half]);
      }
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if constexpr (kLaneQueries<kHeads> == 1) sums[0][half] += sums[1][half];
#pragma unroll
    for (int query = 0; query < kLaneQueries<kHeads>; ++query) {
      sums[query][half] *= scale[half];
      to.scores[query][8 * half] = sums[query][half];
    }
  }
  if (sampled.any() && static_cast<int>(threadIdx.x) % 32 / 4 == sampled.row) {
#pragma unroll
    for (int query = 0; query < kLaneQueries<kHeads>; ++query) {
      *reinterpret_cast<float2*>(to.sample[query] + sampled.place) = {sums[query][0],
                                                                      sums[query][1]};
    }
  }
#pragma unroll
  for (int query = 0; query < kLaneQueries<kHeads>; ++query) {
    to.scores[query] += kTileKeys;
    to.sample[query] += kTileSample;
  }
}

/// Loads the scales of the two keys whose products a lane holds; 1 without scales.
template <bool kScaled>
__device__ void load_scales(float (&scale)[2], const ScoreInputs& inputs, const Plan& plan,
                            std::uint32_t key) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const std::uint32_t s = key + 8 * half;
    const bool is_key = s < static_cast<std::uint32_t>(plan.keys);
    scale[half] = kScaled && is_key ? __ldg(inputs.k_scale + s) : 1.0f;
  }
}
/// Multiplies scales that do not commute with max (zero, negative, infinite, NaN) into the products
/// instead of the sums, and leaves 1 in their place.
__device__ inline void scale_products(float (&products)[128], float (&scale)[2]) {
  if (__all_sync(0xffffffffu, commutes_with_max(scale[0]) && commutes_with_max(scale[1]))) return;
  // Each key is treated by itself, so that its rounding does not depend on its neighbours.
  const float factor[2] = {commutes_with_max(scale[0]) ? 1.0f : scale[0],
                           commutes_with_max(scale[1]) ? 1.0f : scale[1]};
#pragma unroll
  for (int i = 0; i < 128; ++i) products[i] *= factor[i / 2 % 2];
#pragma unroll
  for (int half = 0; half < 2; ++half)
    scale[half] = commutes_with_max(scale[half]) ? scale[half] : 1.0f;
}

/// Keeps the compiler from computing a descriptor only once this warpgroup has the tensor cores.
/// The upper half is constant.
__device__ inline void materialize(std::uint64_t& descriptor) {
  auto low = static_cast<std::uint32_t>(descriptor);
  asm volatile("" : "+r"(low));
  descriptor = descriptor >> 32 << 32 | low;
}

/// kOddScales: some scales may not commute with max.
template <class T, int kHeads, bool kPadded, bool kOddScales>
__device__ void consume(const ScoreInputs& inputs, const Plan& plan, SharedStorage<T>& shared) {
  constexpr bool kScaled = sizeof(T) == 1;
  const int side = static_cast<int>(threadIdx.x) / kWarpgroup - 1;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int first_row = side * kRows + (static_cast<int>(threadIdx.x) % kWarpgroup) / 32 * 16;
  PipelineState<kStages<T>> key_state;
  if (side == 1) hand_over_tensor_cores(0);
  for (PipelineState<kGroups> query_state;; query_state.next()) {
    float weights[kColumns / 4];
    shared.queries_full[query_state.stage].wait(query_state.phase);
    const Unit& unit = shared.units[query_state.stage];
    const int end = unit.end;
    if (end == 0) break;
    load_weights(weights, shared.weights[query_state.stage]);
    const int first_key = unit.first_key;
    int tile = unit.first;
    Targets<kHeads> to;
#pragma unroll
    for (int query = 0; query < kLaneQueries<kHeads>; ++query) {
      const std::int64_t before =  // tiles of the group
          (lane % 4 * kLaneQueries<kHeads> + query) * unit.tiles + tile;
      float* const scores = plan.scores + unit.scores;
      to.scores[query] = scores + before * kTileKeys + first_row + lane / 4;
      to.sample[query] = scores + plan.sample_offset(unit.tiles) + before * kTileSample;
    }
    std::uint64_t queries[kTiles<T>];
#pragma unroll
    for (int i = 0; i < kTiles<T>; ++i) {
      queries[i] = k_major(shared_address(shared.queries[query_state.stage].tiles[i]));
      materialize(queries[i]);
    }
    for (; tile < end; ++tile, key_state.next()) {
      std::uint64_t keys[kTiles<T>];
#pragma unroll
      for (int i = 0; i < kTiles<T>; ++i) {
        keys[i] = k_major(
            shared_address(shared.keys[key_state.stage].tiles[i] + side * kRows * kTileRowBytes));
        materialize(keys[i]);
      }
      shared.full[key_state.stage].wait(key_state.phase);
      acquire_tensor_cores(side);
      float products[128];
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < kTiles<T>; ++i) {
#pragma unroll
        for (int j = 0; j < kTileRowBytes / 32; ++j) {
          // Tiles are aligned so that these bits of their descriptors are 0.
          multiply_64x256_k_major<T>(products, keys[i] | j * kNextKMajor,
                                     queries[i] | j * kNextKMajor, i + j > 0);
        }
      }
      wgmma_commit();
      hand_over_tensor_cores(1 - side);
      // Only now: a warpgroup that holds the tensor cores must not wait for memory.
      float scale[2];
      load_scales<kScaled>(scale, inputs, plan,
                           first_key + tile * kTileKeys + first_row + lane / 4);
      wgmma_wait<0>();
      if (lane == 0) shared.free[key_state.stage].arrive();
      if (tile + 1 == end) shared.queries_free[query_state.stage].arrive();
      if constexpr (kOddScales) scale_products(products, scale);
      store_scores<kHeads, kPadded>(products, weights, scale, inputs.heads,
                                    Sampled(tile, first_row / 16), to);
    }
  }
  if (side == 0) acquire_tensor_cores(0);  // the last hand-over has no other taker
}

}  // namespace winnow::cuda::index_topk::sm90
