// SPDX-License-Identifier: Apache-2.0
// Warpgroup 0: S = Q K^T and its softmax, P to shared memory.
#pragma once

#include <cstdint>

#include "cuda/hopper/gather.cuh"
#include "cuda/hopper/quad.cuh"
#include "cuda/sparse_attention/forward_sm90/shared.cuh"
#include "cuda/sparse_attention/forward_sm90/softmax.cuh"

namespace winnow::cuda::sparse_attention::forward_sm90 {

/// The first kRegisterTiles tiles of an item's Q, as fragments in the registers of warpgroup 0.
template <class T>
struct QueryRegisters {
  std::uint32_t fragments[kRegisterTiles * 4][4];  // per 16 channels

  /// Issues the loads; until `arrange` the words are in the order of memory.
  __device__ void load(const ForwardParameters& params, int item) {
    const int group = (threadIdx.x % 32) / 4;
    const int c = threadIdx.x % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = (threadIdx.x / 32) * 16 + group + 8 * half;
      const int head = (item % params.head_groups) * kHeads + row;
      const T* q = static_cast<const T*>(params.q) +
                   (item / params.head_groups) * params.q_token_stride +
                   head * params.q_head_stride + c * 8;
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

/// Copies the other tiles of Q to shared memory. The previous item's products must be done with
/// them.
template <class T, int kTiles>
__device__ void copy_query_tiles(const ForwardParameters& params, SharedStorage& shared, int item) {
  const int piece = threadIdx.x % 8;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = threadIdx.x / 8 + 16 * i;
    const int head = (item % params.head_groups) * kHeads + row;
    const bool is_there = head < params.heads;
    const T* q = static_cast<const T*>(params.q) +
                 (item / params.head_groups) * params.q_token_stride +
                 (is_there ? head : 0) * params.q_head_stride + piece * 8;
#pragma unroll
    for (int tile = kRegisterTiles; tile < kTiles; ++tile) {
      copy_16_bytes(shared_address(shared.q[tile - kRegisterTiles]) + tile_offset(row, piece),
                    q + tile * kTileColumns, is_there);
    }
  }
}

/// Issues all loads of an item's Q; none after the last item.
template <class T, int kTiles>
__device__ inline void load_query(const ForwardParameters& params, SharedStorage& shared,
                                  QueryRegisters<T>& query, int item) {
  if (item >= params.items) return;
  query.load(params, item);
  copy_query_tiles<T, kTiles>(params, shared, item);
}

/// Prefetches Q of a later item into L2, so that its load is short.
template <class T, int kTiles>
__device__ void prefetch_query(const ForwardParameters& params, int item) {
  if (item >= params.items) return;
  const int row = static_cast<int>(threadIdx.x) / 2;
  const int head = (item % params.head_groups) * kHeads + row;
  if (head >= params.heads) return;
  const T* q = static_cast<const T*>(params.q) +
               (item / params.head_groups) * params.q_token_stride + head * params.q_head_stride;
#pragma unroll
  for (int i = 0; i < 5; ++i) {
    const int tile = 2 * i + static_cast<int>(threadIdx.x) % 2;
    if (tile < kTiles) asm volatile("prefetch.global.L2 [%0];" ::"l"(q + tile * kTileColumns));
  }
}

/// Writes lse and max_logits of an item, and tells warpgroups 1 and 2 by what to multiply out.
__device__ inline void finish_item(const ForwardParameters& params, SharedStorage& shared,
                                   const RowState (&state)[2], int item, int stage) {
  const int t = item / params.head_groups;
  const int row_of_lane =
      static_cast<int>(threadIdx.x) / 32 * 16 + static_cast<int>(threadIdx.x) % 32 / 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float sum = quad_sum(state[half].sum);
    const int row = row_of_lane + 8 * half;
    const int head = (item % params.head_groups) * kHeads + row;
    if (threadIdx.x % 4 != 0) continue;
    const auto logit = [&](float product) { return product * params.power * params.rest; };
    const bool has_sink = params.sink != nullptr && head < params.heads;
    const RowEnd end =
        finish_row(logit(state[half].maximum), sum, has_sink ? params.sink[head] : -INFINITY);
    shared.finish[stage][row] = end.normalizer;
    if (head >= params.heads) continue;
    params.lse[t * params.lse_stride + head] = end.lse;
    if (params.max_logits != nullptr) {
      params.max_logits[t * params.max_logits_stride + head] = logit(state[half].largest);
    }
  }
}

/// Issues S = Q K^T of the block in a stage. After the products of each tile it calls
/// between(tile): issuing a product waits for room in the queue of the tensor cores, and other work
/// can fill that time.
template <class T, int kTiles, class Between>
__device__ inline void multiply_keys(Scores& s, const QueryRegisters<T>& query,
                                     std::uint32_t q_tiles, std::uint32_t stage,
                                     const Between& between) {
  fence_proxy_async();
  wgmma_fence();
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    const std::uint64_t keys = k_major(stage + tile * kTileBytes);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (tile < kRegisterTiles) {
        multiply_64x48x16<T>(s, query.fragments[4 * tile + i], keys + i * kNextKMajor,
                             tile > 0 || i > 0);
      } else {
        const std::uint64_t q = k_major(q_tiles + (tile - kRegisterTiles) * kQueryTileBytes);
        multiply_64x48x16<T>(s, q + i * kNextKMajor, keys + i * kNextKMajor, 1);
      }
    }
    between(tile);
  }
  wgmma_commit();
}

/// Waits for S of all four warps: P overwrites the last tile of the stage, which every warp's
/// products must have read.
__device__ inline void finish_products() {
  wgmma_wait<0>();
  sync_warps<1, kWarpgroup>();
}

/// Handles a block that is not the last of its item: S of the next block is issued during this
/// one's softmax.
template <class T, int kTiles>
__device__ inline void score_block_and_start_next(const ForwardParameters& params,
                                                  SharedStorage& shared,
                                                  const QueryRegisters<T>& query, Scores& s,
                                                  Scores& next, RowState (&state)[2],
                                                  PipelineState& pipeline) {
  const int stage = pipeline.stage;
  pipeline.next();
  Softmax<T> softmax(params, s, state, shared, stage);
  shared.full[pipeline.stage].wait(pipeline.phase);
  finish_products();
  multiply_keys<T, kTiles>(next, query, shared_address(shared.q),
                           shared_address(shared.stages[pipeline.stage]), [&](int tile) {
#pragma unroll
                             for (int i = kStepsPerTile * tile; i < kStepsPerTile * (tile + 1);
                                  ++i) {
                               if (i >= Softmax<T>::kSteps) break;
                               softmax.step(i);
                               if (i < Softmax<T>::kSteps - 1) continue;
                               fence_proxy_async();
                               shared.ready[stage].arrive();
                             }
                           });
}

/// Handles the last block of an item: the loads of the next item's Q are issued before the softmax.
template <class T, int kTiles>
__device__ inline void score_last_block(const ForwardParameters& params, SharedStorage& shared,
                                        QueryRegisters<T>& query, Scores& s, RowState (&state)[2],
                                        int item, PipelineState& pipeline) {
  Softmax<T> softmax(params, s, state, shared, pipeline.stage);
  finish_products();
  load_query<T, kTiles>(params, shared, query, item + static_cast<int>(gridDim.x));
#pragma unroll
  for (int i = 0; i < Softmax<T>::kSteps; ++i) softmax.step(i);
  finish_item(params, shared, state, item, pipeline.stage);
  fence_proxy_async();
  shared.ready[pipeline.stage].arrive();
  pipeline.next();
}

template <class T, int kTiles>
__device__ void compute_scores(const ForwardParameters& params, SharedStorage& shared) {
  PipelineState pipeline;
  const auto is_last = [&] { return shared.info[pipeline.stage].is_last; };
  QueryRegisters<T> query;
  load_query<T, kTiles>(params, shared, query, static_cast<int>(blockIdx.x));
  for (int item = static_cast<int>(blockIdx.x); item < params.items;
       item += static_cast<int>(gridDim.x)) {
    prefetch_query<T, kTiles>(params, item + static_cast<int>(gridDim.x));
    query.arrange();
    asm volatile("cp.async.wait_all;" ::: "memory");
    fence_proxy_async();
    sync_warps<1, kWarpgroup>();  // all of Q is there

    RowState state[2];
    Scores even, odd;
    shared.full[pipeline.stage].wait(pipeline.phase);
    multiply_keys<T, kTiles>(even, query, shared_address(shared.q),
                             shared_address(shared.stages[pipeline.stage]), [](int) {});
    while (true) {
      if (is_last()) {
        score_last_block<T, kTiles>(params, shared, query, even, state, item, pipeline);
        break;
      }
      score_block_and_start_next<T, kTiles>(params, shared, query, even, odd, state, pipeline);
      if (is_last()) {
        score_last_block<T, kTiles>(params, shared, query, odd, state, item, pipeline);
        break;
      }
      score_block_and_start_next<T, kTiles>(params, shared, query, odd, even, state, pipeline);
    }
  }
}

}  // namespace winnow::cuda::sparse_attention::forward_sm90
