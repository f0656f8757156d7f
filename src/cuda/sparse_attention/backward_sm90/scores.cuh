// SPDX-License-Identifier: Apache-2.0
// Warpgroup 0: the loads of keys, q and d_out; S = Q K^T and dP = dO V^T, P and dS from them; and
// the rope part of d_q.
#pragma once

#include <cstdint>

#include "cuda/hopper/gather.cuh"
#include "cuda/hopper/tensor_copy.cuh"
#include "cuda/sparse_attention/backward_sm90/block_scores.cuh"
#include "cuda/sparse_attention/backward_sm90/constants.cuh"
#include "cuda/sparse_attention/backward_sm90/d_q.cuh"
#include "cuda/sparse_attention/backward_sm90/pacing.cuh"
#include "cuda/sparse_attention/backward_sm90/pieces.cuh"
#include "cuda/sparse_attention/backward_sm90/shared.cuh"

namespace winnow::cuda::sparse_attention::backward_sm90 {

/// Gathers the rows of a query's keys, block by block. Eight lanes copy a row; a thread has a part
/// of four rows.
template <class T, int kTiles, KeyGradients kMode>
class Gatherer {
 public:
  __device__ Gatherer(const BackwardSm90Parameters<T>& params, SharedStorage& shared)
      : params_(params), shared_(shared) {}

  __device__ void start_piece(const Item& item, const Piece& piece) {
    const int first_slot = piece.begin * kBlock;
    indices_ = params_.indices + item.t * params_.indices_stride + first_slot;
    slots_left_ = min(item.slots, piece.end * kBlock) - first_slot;
    load_keys();
  }

  /// Copies a block, whose keys were loaded one call ago, and loads the next block's keys.
  __device__ void gather(int parity) {
    const int lane = static_cast<int>(threadIdx.x % 8);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int row = row_of(i);
      const std::int32_t key = __shfl_sync(0xffffffffu, key_, i, 8);
      if (lane == 0) shared_.keys[parity][row] = key;
      if (kMode == KeyGradients::exact && lane == 0) {
        copy_4_bytes(shared_address(&shared_.inverse_quanta[parity][row]),
                     params_.inverse_quanta + (key < 0 ? 0 : key), key >= 0);
      }
      const T* const from = params_.kv + (key < 0 ? 0 : key) * params_.kv_stride + lane * 8;
      const std::uint32_t to = shared_address(shared_.kv) + tile_offset(row, lane);
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        copy_16_bytes(to + tile * kTileBytes, from + tile * kTileColumns, key >= 0);
      }
    }
    load_keys();
  }

 private:
  static constexpr int kGroups = kWarpgroup / 8;
  static constexpr int kRows = kBlock / kGroups;
  __device__ static int row_of(int i) { return static_cast<int>(threadIdx.x / 8) + i * kGroups; }

  __device__ void load_keys() {
    const int slot = row_of(static_cast<int>(threadIdx.x % kRows));
    const std::int32_t key = slot < slots_left_ ? __ldg(indices_ + slot) : -1;
    indices_ += kBlock;
    slots_left_ -= kBlock;
    key_ = key < params_.keys ? key : -1;
  }

  const BackwardSm90Parameters<T>& params_;
  SharedStorage& shared_;
  const std::int32_t* indices_ = nullptr;  // of the keys to be loaded next
  int slots_left_ = 0;
  std::int32_t key_ = -1;  // of row_of(i) in lane i of eight, i < kRows; negative: none
};

/// The first of the two rows, 8 apart, that a thread of this warpgroup has of an accumulator:
/// heads.
__device__ inline int own_row() {
  const unsigned thread = own_thread();
  return static_cast<int>(thread / 32 * 16 + thread % 32 / 4);
}

/// Stores two neighbours of a row of P or dS in the layout that the products read.
__device__ inline void store_pair(std::byte* tile, int row, int i, std::uint32_t pair) {
  *reinterpret_cast<std::uint32_t*>(tile + tile_offset(row, i) + threadIdx.x % 4 * 4) = pair;
}

/// Starts d = A B^T, where both operands have kTiles K-major tiles.
template <class T, int kTiles, class A, class B>
__device__ void start_rows(float (&d)[32], const A& a, const B& b) {
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < kTiles * 4; ++i) {
    multiply_64x64x16<T, 0, 0>(d, k_major(shared_address(a[i / 4])) + i % 4 * kNextKMajor,
                               k_major(shared_address(b[i / 4])) + i % 4 * kNextKMajor, i > 0);
  }
  wgmma_commit();
}

/// Loads q and d_out of a piece, each tile when the gradients of the piece before no longer need
/// it: the last tiles of both warpgroups, or all others. `pieces` counts those before. Called by
/// one thread.
template <int kTiles, bool kLast>
__device__ void load_item(const CUtensorMap& q, const CUtensorMap& d_out, const Item& item,
                          int pieces, SharedStorage& shared) {
  const auto t = static_cast<int>(item.t);
  const auto copy_q = [&](int tile) {
    shared.tile_free[tile].wait(pieces - 1);
    copy_box(shared.q[tile], q, shared.q_full, tile * kTileColumns, item.first_head, t);
  };
  // In the order in which the gradients free them.
  if constexpr (!kLast) {
    shared.q_full.arrive_and_expect(kTiles * kTileBytes);
    shared.d_out_full.arrive_and_expect(kValueTiles * kTileBytes);
    if constexpr (kTiles > kValueTiles) copy_q(kValueTiles);
  }
  for (int i = kLast ? kSideTiles - 1 : 0; i < (kLast ? kSideTiles : kSideTiles - 1); ++i) {
    for (int tile = i; tile < kValueTiles; tile += kSideTiles) copy_q(tile);
    for (int tile = i; tile < kValueTiles; tile += kSideTiles) {
      copy_box(shared.d_out[tile], d_out, shared.d_out_full, tile * kTileColumns, item.first_head,
               t);
    }
  }
}

template <class T, int kTiles, KeyGradients kMode>
__device__ void compute_scores(const BackwardSm90Parameters<T>& params, const CUtensorMap& q,
                               const CUtensorMap& out, const CUtensorMap& d_out,
                               SharedStorage& shared) {
  constexpr bool kRope = kTiles > kValueTiles;
  Gatherer<T, kTiles, kMode> gatherer(params, shared);
  int blocks = 0;  // of all pieces
  for (int pieces = 0; has_piece<kMode>(params, shared.schedule, pieces); ++pieces) {
    // The others still compute and add the last gradients of the piece before; its keys are no
    // longer needed.
    if (kMode == KeyGradients::added && threadIdx.x == 0 && params.exchange.progress != nullptr) {
      keep_pace(params.exchange.progress, blocks, params.lead);
    }
    const Piece piece = piece_of<kMode>(params, shared.schedule, pieces);
    const Item item = item_of(params, piece.number);
    gatherer.start_piece(item, piece);
    if constexpr (kMode != KeyGradients::exact) {
      compute_constants(params, out, d_out, item, pieces, shared);
    }
    if (threadIdx.x == 0) load_item<kTiles, false>(q, d_out, item, pieces, shared);
    gatherer.gather(blocks % 2);
    if (threadIdx.x == 0) {
      load_item<kTiles, true>(q, d_out, item, pieces, shared);
      shared.has_keys[pieces % 2] = false;
    }
    if (kMode == KeyGradients::exact && threadIdx.x < kHeads) {
      shared.constants[threadIdx.x] =
          params.constants[std::int64_t{piece.number} * kHeads + threadIdx.x];
    }
    const auto heads_of_lane = [&] {
      const HeadConstants* const of_item =
          kMode == KeyGradients::exact ? shared.constants : constants_of(shared, pieces);
      return LaneHeads(of_item + own_row());
    };
    shared.q_full.wait(pieces);
    shared.d_out_full.wait(pieces);
    sync_score_warps();  // the constants are written
    float d_q[32] = {};  // of the rope part
    if constexpr (kRope) {
      if (piece.begin > 0) {
        const Carried carried = carried_of<kTiles>(params, piece);
        take_over<kWarpgroup>(d_q, carried.rope_sums, carried.rope_blocks, piece);
      }
    }
    const int end = blocks + piece.end - piece.begin;
    for (; blocks < end; ++blocks) {
      wait_for_own_copies();
      fence_proxy_async();
      sync_score_warps();
      const std::int32_t(&keys)[kBlock] = shared.keys[blocks % 2];

      // One product after the other, which leaves registers for d_q. Nothing is stored before both
      // are done, because the previous block's gradients may still read P and dS. What P and dS
      // need is read while the products run: in registers it would be too much.
      std::uint32_t p[16];   // P, two neighbours in a word
      std::uint32_t ds[16];  // exp(s - lse), 0 where there is no key; then dS
      {
        float s[32];
        start_rows<T, kTiles>(s, shared.q, shared.kv);
        const unsigned lane = own_thread() % 32;
        const std::uint32_t valid[2] = {__ballot_sync(0xffffffffu, keys[lane] >= 0),
                                        __ballot_sync(0xffffffffu, keys[lane + 32] >= 0)};
        if (threadIdx.x == 0 && (valid[0] | valid[1]) != 0) shared.has_keys[pieces % 2] = true;
        const LaneHeads heads = heads_of_lane();
        wgmma_wait<0>();
        probabilities<T>(s, valid, heads, params.scale_log2, p, ds);
      }
      {
        float dp[32];
        start_rows<T, kValueTiles>(dp, shared.d_out, shared.kv);
        const LaneHeads heads = heads_of_lane();
        wgmma_wait<0>();
        score_gradients<T>(dp, heads, params.scale, ds);
      }
      shared.scores_free.wait(blocks - 1);
      const int row = own_row();
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        store_pair(shared.p, row + i % 2 * 8, i / 2, p[i]);
        store_pair(shared.ds, row + i % 2 * 8, i / 2, ds[i]);
      }
      fence_proxy_async();
      shared.scores_full.arrive();
      sync_score_warps();
      if constexpr (kRope) {
        // dQ += dS K of the rope's 64 columns.
        const std::uint64_t ds = k_major(shared_address(shared.ds));
        const std::uint64_t k = mn_major(shared_address(shared.kv[kValueTiles]), kTileBytes);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < kBlock / 16; ++i) {
          multiply_64x64x16<T, 0, 1>(d_q, ds + i * kNextKMajor, k + i * kNextMnMajor, 1);
        }
        wgmma_commit();
        wgmma_wait<0>();
        sync_score_warps();  // all warps' products have read the rope tile: it may be overwritten
      }
      shared.kv_free.wait(blocks);
      if constexpr (kMode == KeyGradients::added) count_block(params.exchange.progress);
      if (blocks + 1 < end) gatherer.gather((blocks + 1) % 2);
    }
    if constexpr (kRope) {
      const Piece piece = piece_of<kMode>(params, shared.schedule, anew(pieces));
      const Item item = item_of(params, piece.number);
      if (kMode == KeyGradients::added && piece.end < item.blocks) {
        const Carried carried = carried_of<kTiles>(params, piece);
        hand_on<kWarpgroup>(d_q, carried.rope_sums, carried.rope_blocks, piece);
      } else {
        store_d_q(params, item, d_q, kValueTiles * kTileColumns);
      }
    }
  }
  if (kMode == KeyGradients::added && threadIdx.x == 0 && params.exchange.progress != nullptr) {
    end_pace(params.exchange.progress);
  }
}

}  // namespace winnow::cuda::sparse_attention::backward_sm90
