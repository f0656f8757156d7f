// SPDX-License-Identifier: Apache-2.0
// What the warps of Hopper's index_target share: sizes, parameters, shared memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/hopper/barrier.cuh"
#include "cuda/hopper/pipeline.cuh"
#include "cuda/hopper/wgmma.cuh"

namespace winnow::cuda::target_sm90 {

using namespace winnow::hopper;

inline constexpr int kGroupHeads = 64;  // of a consumer warpgroup: the rows of its products
inline constexpr int kBlock = 64;       // keys of a stage: the columns of a product
inline constexpr int kStages = 3;
inline constexpr int kTileBytes = kBlock * kTileRowBytes;
inline constexpr int kWarpgroup = 128;
inline constexpr int kThreads = 3 * kWarpgroup;

/// One pass over up to 64 heads of every row with one group of consumers, up to 128 with two.
struct Parameters {
  const void* q;                // [tokens, heads, qk_dim], from the first head of the pass on
  const void* kv;               // [keys, qk_dim], from key_offset on
  const std::int32_t* indices;  // [tokens, topk]
  const std::int32_t* lengths;  // [tokens], or null: all slots count
  const float* sink;            // [heads], or null
  const float* lse;             // [tokens, heads], natural
  float* target;                // [tokens, topk]
  std::int64_t q_token_stride, q_head_stride;
  std::int64_t kv_stride;
  std::int64_t indices_stride;
  std::int64_t lse_stride;
  std::int64_t target_stride;
  std::int32_t tokens, heads, keys, topk;
  float scale;
  bool adds;  // to what target holds; otherwise slots without a key become 0
};

/// How the channels of a row and the warpgroups of a thread block are split.
template <int kTiles_, int kGroups_>
struct Shape {
  static constexpr int kTiles = kTiles_;    // of 64 channels
  static constexpr int kGroups = kGroups_;  // of heads, one a consumer warpgroup
  /// Each chunk of a stage's tiles has barriers of its own, so that the gather refills it while
  /// later ones are multiplied.
  static constexpr int kChunkTiles = kTiles == 9 ? 3 : 4;
  static constexpr int kChunks = kTiles / kChunkTiles;
  static constexpr int kProducerThreads = kThreads - kGroups * kWarpgroup;
  static constexpr int kConsumerThreads = kGroups * kWarpgroup;
  static constexpr int kConsumerWarps = kConsumerThreads / 32;
  // A consumer keeps its Q, 144 registers a thread, and accumulators of 32.
  static constexpr int kConsumerRegisters = kGroups == 1 ? 240 : 216;
  static constexpr int kProducerRegisters = kGroups == 1 ? 128 : 72;
};

/// What the producers tell the consumers about a block of keys.
struct BlockInfo {
  std::uint32_t valid[kBlock / 32];  // a bit a slot: whether it holds a key
  std::int32_t first_slot;
  bool is_last;  // of its row
};

template <class Shape>
struct SharedStorage {
  std::byte stages[kStages][Shape::kTiles * kTileBytes];
  float partial[2][Shape::kConsumerWarps][kBlock];  // sums over heads, of blocks in turns
  BlockInfo info[kStages];
  Barrier full[kStages][Shape::kChunks];  // the chunk has landed; the first: info too
  Barrier free[kStages][Shape::kChunks];  // the consumers have multiplied it
};
static_assert(sizeof(SharedStorage<Shape<9, 2>>) <= 227 * 1024);

using PipelineState = hopper::PipelineState<kStages>;  // of blocks of keys

}  // namespace winnow::cuda::target_sm90
