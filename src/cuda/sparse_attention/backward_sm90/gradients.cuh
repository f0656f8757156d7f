// SPDX-License-Identifier: Apache-2.0
// Warpgroups 1 and 2: dQ += dS K of the 512 columns and dKV = dS^T Q + P^T dO of all, one half
// each.
#pragma once

#include <cstdint>

#include "cuda/sparse_attention/backward_sm90/d_q.cuh"
#include "cuda/sparse_attention/backward_sm90/key_gradients.cuh"
#include "cuda/sparse_attention/backward_sm90/pieces.cuh"
#include "cuda/sparse_attention/backward_sm90/shared.cuh"

namespace winnow::cuda::sparse_attention::backward_sm90 {

/// The first of the four tiles of warpgroup 1 or 2.
__device__ inline int first_side_tile() {
  return (static_cast<int>(own_thread() / kWarpgroup) - 1) * kSideTiles;
}

/// Stores dQ of an item and adds its d_sink, or hands its sums on.
template <class T, int kTiles, KeyGradients kMode>
__device__ void finish_piece(const BackwardSm90Parameters<T>& params, int pieces,
                             const float (&d_q)[128], SharedStorage& shared) {
  const Piece piece = piece_of<kMode>(params, shared.schedule, pieces);
  const Item item = item_of(params, piece.number);
  bool has_keys = shared.has_keys[pieces % 2];
  if (kMode == KeyGradients::added && piece.end < item.blocks) {
    const Carried carried = carried_of<kTiles>(params, piece);
    // Released with this thread's sums.
    if (has_keys && own_thread() == kWarpgroup) *carried.has_keys = 1;
    hand_on<2 * kWarpgroup>(d_q, carried.sums, carried.blocks, piece);
    return;
  }
  const auto lane = static_cast<int>(own_thread() % 32);
  const auto of_item = static_cast<int>((own_thread() - kWarpgroup) / 4);
  const int head = item.first_head + of_item;
  if (params.d_sink != nullptr && lane % 4 == 0 && head < params.heads) {
    if (piece.begin > 0) has_keys |= __ldcg(carried_of<kTiles>(params, piece).has_keys) != 0;
    const HeadConstants* constants = constants_of(shared, pieces);
    // Warpgroup 0 may have the next piece's in the place of these.
    if constexpr (kMode == KeyGradients::exact)
      constants = params.constants + std::int64_t{piece.number} * kHeads;
    const float d_sink = has_keys ? constants[of_item].d_sink : 0.0f;
    if constexpr (kMode != KeyGradients::added) {
      params.d_sink[item.t * params.d_sink_stride + head] = d_sink;
    } else {
      atomicAdd(params.d_sink + head, d_sink);
    }
  }
  __syncwarp();  // what was read may be overwritten once lane 0 has freed a block of the next
                 // piece
#pragma unroll
  for (int j = 0; j < kSideTiles; ++j) {
    store_d_q(params, item, d_q + 32 * j, (first_side_tile() + j) * kTileColumns);
  }
}

template <class T, int kTiles, KeyGradients kMode, int kHeadSteps>
__device__ void compute_gradients(const BackwardSm90Parameters<T>& params, SharedStorage& shared) {
  int blocks = 0;
  for (int pieces = 0; has_piece<kMode>(params, shared.schedule, pieces); ++pieces) {
    const Piece piece = piece_of<kMode>(params, shared.schedule, pieces);
    shared.q_full.wait(pieces);
    shared.d_out_full.wait(pieces);
    float d_q[128] = {};
    if (piece.begin > 0) {
      const Carried carried = carried_of<kTiles>(params, piece);
      take_over<2 * kWarpgroup>(d_q, carried.sums, carried.blocks, piece);
    }
    const int first = blocks - piece.begin;
    const int end = first + piece.end;
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
      KeyBlock key_block{shared.keys[blocks % 2], shared.inverse_quanta[blocks % 2], 0};
      if constexpr (kMode == KeyGradients::written)
        key_block.first_slot = first_slot_of(params, piece.number, blocks - first);
      // With a piece's last gradients of a tile the next piece's tile may be loaded.
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
    finish_piece<T, kTiles, kMode>(params, anew(pieces), d_q, shared);
  }
}

}  // namespace winnow::cuda::sparse_attention::backward_sm90
