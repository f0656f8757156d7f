// SPDX-License-Identifier: Apache-2.0
// Warpgroup 0: S = Q K^T and its softmax, P to shared memory.
#pragma once

#include <cstdint>

#include "cuda/hopper/gather.cuh"
#include "cuda/hopper/quad.cuh"
#include "cuda/sparse_attention/forward_sm90/shared.cuh"
#include "cuda/sparse_attention/forward_sm90/softmax.cuh"

namespace winnow::cuda::forward {

/// The first kRegisterTiles tiles of Q of one item, as fragments in the registers of warpgroup 0.
template <class T>
struct QueryRegisters {
  std::uint32_t fragments[kRegisterTiles * 4][4];  // per 16 channels

  /// Starts the loads; the words stand in the order of memory until `arrange`.
  __device__ void load(const Params<T>& params, int item) {
    const int group = (threadIdx.x % 32) / 4;
    const int c = threadIdx.x % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = (threadIdx.x / 32) * 16 + group + 8 * half;
      const int head = (item % params.head_blocks) * kHeads + row;
      const T* q =
          params.q + (item / params.head_blocks) * params.q_row + head * params.q_head + c * 8;
#pragma unroll
      for (int i = 0; i < 2 * kRegisterTiles; ++i) {  // 32 channels at a time: two fragments
        uint4 words{0, 0, 0, 0};
        if (head < params.heads) words = __ldg(reinterpret_cast<const uint4*>(q + 32 * i));
        fragments[2 * i][half] = words.x;
        fragments[2 * i][half + 2] = words.y;
        fragments[2 * i + 1][half] = words.z;
        fragments[2 * i + 1][half + 2] = words.w;
      }
    }
  }
  __device__ void arrange() {
#pragma unroll
    for (int i = 0; i < 2 * kRegisterTiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        std::uint32_t words[4] = {fragments[2 * i][half], fragments[2 * i][half + 2],
                                  fragments[2 * i + 1][half], fragments[2 * i + 1][half + 2]};
        transpose_in_quad(words);
        fragments[2 * i][half] = words[0];
        fragments[2 * i][half + 2] = words[1];
        fragments[2 * i + 1][half] = words[2];
        fragments[2 * i + 1][half + 2] = words[3];
      }
    }
  }
};

/// The other tiles of Q to shared memory. The products of the item before must have read them.
template <class T, int kTiles>
__device__ void copy_query_tiles(const Params<T>& params, SharedStorage& shared, int item) {
  const int piece = threadIdx.x % 8;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = threadIdx.x / 8 + 16 * i;
    const int head = (item % params.head_blocks) * kHeads + row;
    const bool is_there = head < params.heads;
    const T* q = params.q + (item / params.head_blocks) * params.q_row +
                 (is_there ? head : 0) * params.q_head + piece * 8;
#pragma unroll
    for (int tile = kRegisterTiles; tile < kTiles; ++tile) {
      copy_16_bytes(shared_address(shared.q[tile - kRegisterTiles]) + tile_offset(row, piece),
                    q + tile * kTileColumns, is_there);
    }
  }
}

/// Starts all loads of an item's Q; none past the last item.
template <class T, int kTiles>
__device__ inline void load_query(const Params<T>& params, SharedStorage& shared,
                                  QueryRegisters<T>& query, int item) {
  if (item >= params.items) return;
  query.load(params, item);
  copy_query_tiles<T, kTiles>(params, shared, item);
}

/// Brings Q of a later item into the L2 cache, so that its load is short.
template <class T, int kTiles>
__device__ void prefetch_query(const Params<T>& params, int item) {
  if (item >= params.items) return;
  const int row = static_cast<int>(threadIdx.x) / 2;
  const int head = (item % params.head_blocks) * kHeads + row;
  if (head >= params.heads) return;
  const T* q = params.q + (item / params.head_blocks) * params.q_row + head * params.q_head;
#pragma unroll
  for (int i = 0; i < 5; ++i) {
    const int tile = 2 * i + static_cast<int>(threadIdx.x) % 2;
    if (tile < kTiles) asm volatile("prefetch.global.L2 [%0];" ::"l"(q + tile * kTileColumns));
  }
}

/// Writes lse and max_logits of an item and tells left and right by what to multiply out.
template <class T>
__device__ void finish_item(const Params<T>& params, SharedStorage& shared,
                            const RowState (&state)[2], int item, int stage) {
  const int t = item / params.head_blocks;
  const int row_of_lane =
      static_cast<int>(threadIdx.x) / 32 * 16 + static_cast<int>(threadIdx.x) % 32 / 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float maximum = state[half].maximum;
    const float sum = quad_sum(state[half].sum);
    const int row = row_of_lane + 8 * half;
    const int head = (item % params.head_blocks) * kHeads + row;
    if (threadIdx.x % 4 != 0) continue;
    const bool has_keys = maximum != -INFINITY || sum != 0;
    float finish = 0;
    if (has_keys) {
      const float sink =
          params.sink != nullptr && head < params.heads ? params.sink[head] * kLog2e : -INFINITY;
      const float top = fmaxf(maximum, sink);
      const float keys = exp2_fast(maximum - top);
      finish = sink == INFINITY ? 0 : keys / (sum * keys + exp2_fast(sink - top));
    }
    shared.finish[stage][row] = finish;
    if (head >= params.heads) continue;
    params.lse[t * params.lse_row + head] = has_keys ? (maximum + log2f(sum)) * kLn2 : -INFINITY;
    if (params.max_logits != nullptr) {
      params.max_logits[t * params.max_logits_row + head] = state[half].largest * kLn2;
    }
  }
}

/// Starts S = Q K^T of the block in a stage. After the products of each tile comes between(tile):
/// starting a product waits for room in the queue of the matrix units, and that time is not to be
/// lost.
template <class T, int kTiles, class Between>
__device__ inline void multiply_keys(Scores& s, const QueryRegisters<T>& query,
                                     std::uint32_t q_tiles, std::uint32_t stage,
                                     const Between& between) {
  fence_for_products();
  wgmma_fence();
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    const std::uint64_t keys = row_contracted(stage + tile * kTileBytes);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (tile < kRegisterTiles) {
        multiply_64x48x16<T>(s, query.fragments[4 * tile + i], keys + i * kNext16InRow,
                             tile > 0 || i > 0);
      } else {
        const std::uint64_t q = row_contracted(q_tiles + (tile - kRegisterTiles) * kQueryTileBytes);
        multiply_64x48x16<T>(s, q + i * kNext16InRow, keys + i * kNext16InRow, 1);
      }
    }
    between(tile);
  }
  wgmma_commit();
}

/// Waits for S of the block in a stage, whose last tile then becomes P: every warp's products must
/// have read it.
__device__ inline void finish_products() {
  wgmma_wait<0>();
  sync_warps<1, kWarpgroup>();
}

/// A block that is not the last of its item: S of the next one is started while the softmax of this
/// one is made.
template <class T, int kTiles>
__device__ inline void score_block_and_start_next(const Params<T>& params, SharedStorage& shared,
                                                  const QueryRegisters<T>& query, Scores& s,
                                                  Scores& next, RowState (&state)[2], Turn& turn) {
  const int stage = turn.stage;
  turn.next();
  Softmax<T> softmax(s, state, shared, stage, params.scale_log2);
  shared.full[turn.stage].wait(turn.round);
  finish_products();
  multiply_keys<T, kTiles>(next, query, shared_address(shared.q),
                           shared_address(shared.stages[turn.stage]), [&](int tile) {
#pragma unroll
                             for (int i = kStepsPerTile * tile; i < kStepsPerTile * (tile + 1);
                                  ++i) {
                               if (i >= Softmax<T>::kSteps) break;
                               softmax.step(i);
                               if (i < Softmax<T>::kSteps - 1) continue;
                               fence_for_products();
                               shared.ready[stage].arrive();
                             }
                           });
}

/// The last block of an item: the load of the next item's Q is started before the softmax.
template <class T, int kTiles>
__device__ inline void score_last_block(const Params<T>& params, SharedStorage& shared,
                                        QueryRegisters<T>& query, Scores& s, RowState (&state)[2],
                                        int item, Turn& turn) {
  Softmax<T> softmax(s, state, shared, turn.stage, params.scale_log2);
  finish_products();
  load_query<T, kTiles>(params, shared, query, item + static_cast<int>(gridDim.x));
#pragma unroll
  for (int i = 0; i < Softmax<T>::kSteps; ++i) softmax.step(i);
  finish_item(params, shared, state, item, turn.stage);
  fence_for_products();
  shared.ready[turn.stage].arrive();
  turn.next();
}

template <class T, int kTiles>
__device__ void compute_scores(const Params<T>& params, SharedStorage& shared) {
  Turn turn;
  const auto is_last = [&] { return shared.info[turn.stage].is_last; };
  QueryRegisters<T> query;
  load_query<T, kTiles>(params, shared, query, static_cast<int>(blockIdx.x));
  for (int item = static_cast<int>(blockIdx.x); item < params.items;
       item += static_cast<int>(gridDim.x)) {
    prefetch_query<T, kTiles>(params, item + static_cast<int>(gridDim.x));
    query.arrange();
    asm volatile("cp.async.wait_all;" ::: "memory");
    fence_for_products();
    sync_warps<1, kWarpgroup>();  // all of Q is there

    RowState state[2];
    Scores even, odd;
    shared.full[turn.stage].wait(turn.round);
    multiply_keys<T, kTiles>(even, query, shared_address(shared.q),
                             shared_address(shared.stages[turn.stage]), [](int) {});
    while (true) {
      if (is_last()) {
        score_last_block<T, kTiles>(params, shared, query, even, state, item, turn);
        break;
      }
      score_block_and_start_next<T, kTiles>(params, shared, query, even, odd, state, turn);
      if (is_last()) {
        score_last_block<T, kTiles>(params, shared, query, odd, state, item, turn);
        break;
      }
      score_block_and_start_next<T, kTiles>(params, shared, query, odd, even, state, turn);
    }
  }
}

}  // namespace winnow::cuda::forward
