// SPDX-License-Identifier: Apache-2.0
// What the threads of Hopper's kernel for the indexer's gradients share: sizes, parameters and
// shared memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cuda/common/key_sums.cuh"
#include "cuda/common/mma.cuh"
#include "cuda/common/row_slots.cuh"
#include "cuda/hopper/barrier.cuh"
#include "cuda/hopper/wgmma.cuh"

namespace winnow::cuda::gradient_sm90 {

using namespace winnow::hopper;

inline constexpr int kConsumers = 128;            // threads: a warpgroup
inline constexpr int kThreads = kConsumers + 32;  // with the producer warp
inline constexpr int kBlock = 64;                 // keys gathered at a time
inline constexpr int kFewHeads = 32;              // of a pass
inline constexpr int kMostHeads = 64;             // of a pass
inline constexpr int kStages = 2;
inline constexpr int kTiles = 2;                        // of 64 columns
inline constexpr int kColumns = kTiles * kTileColumns;  // rows are padded to these
inline constexpr int kTileBytes = kBlock * kTileRowBytes;

/// One pass over up to kHeads heads of every row; strides in elements.
template <class T>
struct Parameters {
  const T* q;             // [tokens, heads, dim], like all others from the pass's first head on
  const T* k;             // [keys, dim]
  const float* weights;   // [tokens, heads]
  const float* d_scores;  // [tokens, slots]
  T* d_q;                 // [tokens, heads, dim]
  float* d_weights;       // [tokens, heads]
  float* d_k;             // [keys, dim], or terms [tokens, slots, dim]
  std::int64_t q_token_stride, q_head_stride;
  std::int64_t k_stride;
  std::int64_t weights_stride, d_scores_stride;
  std::int64_t d_q_token_stride, d_q_head_stride;
  std::int64_t d_weights_stride;
  std::int64_t d_k_stride;
  std::int64_t tokens;
  SlotLists slots;
  std::int32_t heads;
  std::int32_t dim;
  bool zero_is_no_slot;
};

/// A bit per head.
template <int kHeads>
using Heads = std::conditional_t<kHeads == 32, std::uint32_t, std::uint64_t>;

/// The gradients of a query row on their way to device memory.
template <class T, int kHeads>
struct RowOutputs {
  alignas(16) T d_q[kHeads][kColumns + 8];   // eight rows begin in distinct banks
  float d_weights[kConsumers / 32][kHeads];  // the part of each warp's keys
};

/// What the products of a block with q say about its slots.
template <int kHeads>
struct alignas(1024) Scores {
  std::byte d_scores[kHeads * kTileRowBytes];  // [heads, keys], 0 unless a > 0
  Heads<kHeads> positive[kBlock];              // where a > 0; only if not all products are finite
  int infinite_block;                          // the last block of which not all are
};

template <class T, int kHeads>
struct SharedStorage {
  union {
    std::byte k[kStages][kTiles][kTileBytes];  // [keys, columns]
    RowOutputs<T, kHeads> outputs;             // after the last block
  };
  std::byte q[kTiles][kHeads * kTileRowBytes];      // [heads, columns]
  Scores<kHeads> scores[2];                         // of even and odd blocks
  alignas(16) float d_k[kBlock][kTileColumns + 8];  // four rows begin in distinct banks
  std::int32_t keys[kStages][kBlock];               // -1: none
  float d_scores[kStages][kBlock];                  // 0 without a key
  std::uint32_t weights[kHeads / 2];                // two neighbours in a word
  float reduction[kThreads / 32];
  Barrier full[kStages];        // the rows of a block have landed; with the first, q has too
  Barrier slots_full[kStages];  // its keys and d_scores are written
  Barrier free[kStages];        // a block is no longer in use
};
// Three thread blocks per SM with 32 heads, two with 64; the system takes 1 KiB of each.
static_assert(sizeof(SharedStorage<__nv_bfloat16, 32>) <= 228 * 1024 / 3 - 1024);
static_assert(sizeof(SharedStorage<__nv_bfloat16, 64>) <= 228 * 1024 / 2 - 1024);

/// Waits for all consumers.
__device__ inline void sync_consumers() { sync_warps<1, kConsumers>(); }

__device__ inline int lane() { return static_cast<int>(threadIdx.x) % 32; }
__device__ inline int warp() { return static_cast<int>(threadIdx.x) / 32; }
// Of an accumulator d of 64 rows, d[4 * eight + 2 * half + e] of a lane is this row and column.
__device__ inline int row_of(int half) { return warp() * 16 + lane() / 4 + half * 8; }
__device__ inline int column_of(int eight, int e) { return eight * 8 + lane() % 4 * 2 + e; }

}  // namespace winnow::cuda::gradient_sm90
