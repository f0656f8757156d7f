// SPDX-License-Identifier: Apache-2.0
// Warpgroups 1 and 2: dQ += dS K of the 512 columns and dKV = dS^T Q + P^T dO of all, one half
// each.
#pragma once

#include <cstdint>

#include "cuda/sparse_attention/backward_sm90/d_q.cuh"
#include "cuda/sparse_attention/backward_sm90/key_gradients.cuh"
#include "cuda/sparse_attention/backward_sm90/shared.cuh"

namespace winnow::cuda::sparse_attention::backward_sm90 {

/// The first of the four tiles of warpgroup 1 or 2.
__device__ inline int first_side_tile() { return (own_thread() / kWarpgroup - 1) * kSideTiles; }

template <class T, int kTiles, KeyGradients kMode, int kHeadSteps>
__device__ void compute_gradients(const BackwardSm90Parameters<T>& params, SharedStorage& shared) {
  int blocks = 0;
  int items = 0;
  for (int number = static_cast<int>(blockIdx.x); number < params.items;
       number += static_cast<int>(gridDim.x), ++items) {
    shared.q_full.wait(items);
    shared.d_out_full.wait(items);
    float d_q[128] = {};
    const int begin = blocks;
    const int end = blocks + item_of(params, number).blocks;
    for (; blocks < end; ++blocks) {
      const int first_tile = first_side_tile();
      shared.scores_full.wait(blocks);
      const std::uint32_t ds = shared_address(shared.ds);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        multiply_64x256x16<T, 0, 1>(
            d_q, k_major(ds) + i * kNextKMajor,
            mn_major(shared_address(shared.kv[first_tile]), kTileBytes) + i * kNextMnMajor, 1);
      }
      wgmma_commit();
      wgmma_wait<0>();
      if (own_thread() % 32 == 0) shared.kv_free.arrive();
      const KeyBlock key_block{shared.keys[blocks % 2], shared.inverse_quanta[blocks % 2],
                               first_slot_of(params, number, blocks - begin)};
      // With an item's last gradients of a tile the next item's tile may be loaded.
      const bool is_last = blocks + 1 == end;
      const auto free_tile = [&](int tile) {
        if (is_last && own_thread() % 32 == 0) shared.tile_free[tile].arrive();
      };
      if constexpr (kTiles > kValueTiles) {
        float gradients[16];
        const int half = first_tile / kSideTiles;
        compute_rope_gradients<T, kHeadSteps>(shared, half, gradients);
        free_tile(kValueTiles);
        emit_columns<kMode>(params, key_block, gradients,
                            kValueTiles * kTileColumns + half * kTileColumns / 2);
      }
#pragma unroll 1
      for (int tile = first_tile; tile < first_tile + kSideTiles; ++tile) {
        float gradients[32];
        compute_key_gradients<T, kHeadSteps>(shared, tile, gradients);
        if (tile + 1 == first_tile + kSideTiles && own_thread() % 32 == 0) {
          shared.scores_free.arrive();
        }
        free_tile(tile);
        emit_columns<kMode>(params, key_block, gradients, tile * kTileColumns);
      }
    }
    const int lane = own_thread() % 32;
    const Item item = item_of(params, number);
    const int of_item = (static_cast<int>(threadIdx.x) - kWarpgroup) / 4;
    const int head = item.first_head + of_item;
    if (params.d_sink != nullptr && lane % 4 == 0 && head < params.heads) {
      const HeadConstants* constants = constants_of(shared, items);
      // Warpgroup 0 may have the next item's in the place of these.
      if constexpr (kMode == KeyGradients::exact)
        constants = params.constants + std::int64_t{number} * kHeads;
      const float d_sink = shared.has_keys[items % 2] ? constants[of_item].d_sink : 0.0f;
      if constexpr (kMode != KeyGradients::added) {
        params.d_sink[item.t * params.d_sink_stride + head] = d_sink;
      } else {
        atomicAdd(params.d_sink + head, d_sink);
      }
    }
    __syncwarp();  // what was read may be overwritten once lane 0 has freed a block of the next
                   // item
#pragma unroll
    for (int j = 0; j < kSideTiles; ++j) {
      store_d_q(params, item, d_q + 32 * j, (first_side_tile() + j) * kTileColumns);
    }
  }
}

}  // namespace winnow::cuda::sparse_attention::backward_sm90
