// SPDX-License-Identifier: Apache-2.0
// Warpgroups 1 and 2: dQ += dS K and dKV = dS^T Q + P^T dO, each for one half of the 512 columns.
#pragma once

#include <cstdint>

#include "cuda/sparse_attention/backward_sm90/d_q.cuh"
#include "cuda/sparse_attention/backward_sm90/head_constants.cuh"
#include "cuda/sparse_attention/backward_sm90/key_gradients.cuh"
#include "cuda/sparse_attention/backward_sm90/shared.cuh"

namespace winnow::cuda::sparse_attention::backward_sm90 {

/// Writes the constants of an item's heads to shared memory.
template <KeyGradients kMode, class T>
__device__ void compute_constants(const BackwardSm90Parameters<T>& params, int number,
                                  SharedStorage& shared) {
  const int thread = static_cast<int>(threadIdx.x) - kWarpgroup;
  const auto store = [&](int head, const HeadConstants& constants) {
    shared.constants[head] = constants;
    shared.constants_full.arrive();
  };
  if constexpr (kMode == KeyGradients::exact) {
    if (thread < kHeads) store(thread, params.constants[std::int64_t{number} * kHeads + thread]);
  } else {
    for_each_head(
        params, item_of(params, number), thread, [](uint4) {}, store);
  }
}

/// The first of the four tiles of warpgroup 1 or 2.
__device__ inline int first_side_tile() { return (own_thread() / kWarpgroup - 1) * kSideTiles; }

template <class T, KeyGradients kMode>
__device__ void compute_gradients(const BackwardSm90Parameters<T>& params, SharedStorage& shared) {
  int blocks = 0;
  int items = 0;
  for (int number = static_cast<int>(blockIdx.x); number < params.items;
       number += static_cast<int>(gridDim.x), ++items) {
    compute_constants<kMode>(params, number, shared);
    shared.item_full.wait(items);
    float d_q[128] = {};
    const int end = blocks + item_of(params, number).blocks;
    for (; blocks < end; ++blocks) {
      const int first_tile = first_side_tile();
      shared.scores_full.wait(blocks);
      const std::uint32_t ds = shared_address(shared.ds);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        multiply_64x256x16<T>(
            d_q, k_major(ds) + i * kNextKMajor,
            mn_major(shared_address(shared.kv[first_tile]), kTileBytes) + i * kNextMnMajor, 1);
      }
      wgmma_commit();
      wgmma_wait<0>();
      if (own_thread() % 32 == 0) shared.kv_free.arrive();
      const int block = blocks - end + item_of(params, number).blocks;
      const KeyBlock key_block{shared.keys[blocks % 2], first_slot_of(params, number, block)};
#pragma unroll 1
      for (int tile = first_tile; tile < first_tile + kSideTiles; ++tile) {
        emit_key_gradients<kMode, true>(params, shared, key_block, tile, [&] {
          if (tile + 1 == first_tile + kSideTiles && own_thread() % 32 == 0) {
            shared.scores_free.arrive();
          }
        });
      }
    }
    const int lane = own_thread() % 32;
    if (lane == 0) shared.item_free.arrive();
    const Item item = item_of(params, number);
    const int of_item = (static_cast<int>(threadIdx.x) - kWarpgroup) / 4;
    const int head = item.first_head + of_item;
    if (params.d_sink != nullptr && lane % 4 == 0 && head < params.heads) {
      const float d_sink = shared.has_keys[items % 2] ? shared.constants[of_item].d_sink : 0.0f;
      if constexpr (kMode != KeyGradients::added) {
        params.d_sink[item.t * params.d_sink_stride + head] = d_sink;
      } else {
        atomicAdd(params.d_sink + head, d_sink);
      }
    }
#pragma unroll
    for (int j = 0; j < kSideTiles; ++j) {
      store_d_q(params, item, d_q + 32 * j, (first_side_tile() + j) * kTileColumns);
    }
  }
}

}  // namespace winnow::cuda::sparse_attention::backward_sm90
