// SPDX-License-Identifier: Apache-2.0
// What the warps of Hopper's index_target share: parameters and shared memory.
#pragma once

#include <cstdint>

#include "cuda/index_loss/sm90/products.cuh"

namespace winnow::cuda::target_sm90 {

/// One pass over up to 64 heads of every row with one consumer warpgroup, up to 128 with two.
struct Parameters {
  Heads heads;
  const void* q;                // [tokens, heads, qk_dim]
  const void* kv;               // [keys, qk_dim], from key_offset on
  const std::int32_t* indices;  // [tokens, topk]
  const std::int32_t* lengths;  // [tokens], or null: all slots count
  float* target;                // [tokens, topk]
  std::int64_t q_token_stride, q_head_stride;
  std::int64_t kv_stride;
  std::int64_t indices_stride;
  std::int64_t target_stride;
  std::int32_t tokens, keys, topk;
  float scale;
  bool adds;  // to what target holds; otherwise slots without a key become 0
};

/// What the producers tell the consumers about a block of keys.
struct alignas(16) BlockInfo {
  std::uint32_t valid[kBlock / 32];  // a bit a slot: whether it holds a key
  std::int32_t first_slot;
  bool is_last;  // of its row
};

/// Gives every lane what lane 0 reads, which then may free it.
__device__ inline BlockInfo broadcast(const BlockInfo& shared) {
  BlockInfo info{};
  if (threadIdx.x % 32 == 0) info = shared;
  const auto from_lane_0 = [](auto word) { return __shfl_sync(0xffffffffu, word, 0); };
  return {{from_lane_0(info.valid[0]), from_lane_0(info.valid[1])},
          from_lane_0(info.first_slot),
          from_lane_0(static_cast<int>(info.is_last)) != 0};
}

template <class Shape>
struct SharedStorage {
  KeyRing<Shape> ring;
  float partial[2][Shape::kConsumerWarps][kBlock];  // sums over heads, of blocks in turns
  BlockInfo info[kStages];                          // `full` of a stage's first chunk covers it
};
static_assert(sizeof(SharedStorage<Shape<9, 2>>) <= 227 * 1024);

}  // namespace winnow::cuda::target_sm90
