// SPDX-License-Identifier: Apache-2.0
// What the warps of sparse_attention_backward share: sizes, arguments, shared memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/hopper/barrier.cuh"
#include "cuda/hopper/wgmma.cuh"

namespace winnow::cuda::backward {

using namespace winnow::hopper;

inline constexpr int kHeads = 64;      // of one item
inline constexpr int kBlock = 64;      // keys
inline constexpr int kValueTiles = 8;  // 512 channels
inline constexpr int kMaxTiles = 9;
inline constexpr int kSideTiles = kValueTiles / 2;  // of warpgroup 1, or 2
inline constexpr int kTileBytes = 64 * kTileRowBytes;
inline constexpr int kWarpgroup = 128;
inline constexpr int kThreads = 3 * kWarpgroup;
inline constexpr int kScoreRegisters = 120;
inline constexpr int kGradientRegisters = 192;
inline constexpr float kLog2e = 1.4426950408889634f;

template <class T>
struct Params {
  const T* kv;
  const T* out;
  const T* d_out;
  const std::int32_t* indices;
  const std::int32_t* lengths;  // null: all slots count
  const float* sink;            // null: none
  const float* lse;
  const float* d_lse;  // null: none
  T* d_q;
  float* d_kv;    // rows of keys, or of slots
  float* d_sink;  // [heads], or [tokens, heads] beside rows of slots; null: not asked for
  std::int64_t kv_row, out_row, out_head, d_out_row, d_out_head, indices_row, lse_row, d_lse_row;
  std::int64_t d_q_row, d_q_head, d_kv_row, d_sink_row;
  int heads, keys, topk, head_blocks, items;
  float scale, scale_log2;
};

/// Of one head: exp(s - lse) = exp2(s log2(e) - lse_log2); P = share * that, and dS = (share * dP +
/// offset) * that.
struct HeadNumbers {
  float lse_log2;
  float share;   // exp(lse - L): what the sink leaves to the keys
  float offset;  // d_lse - share * delta
  float d_sink;  // what the sink gets if the query has keys
};

struct SharedStorage {
  std::byte q[kMaxTiles][kTileBytes];
  std::byte d_out[kValueTiles][kTileBytes];
  std::byte kv[kMaxTiles][kTileBytes];
  std::byte p[kTileBytes];       // [heads, keys]
  std::byte ds[kTileBytes];      // likewise, times the scale
  std::int32_t keys[2][kBlock];  // of even and of odd blocks; -1: none
  HeadNumbers numbers[kHeads];
  bool has_keys[2];      // of even and of odd items
  Barrier item_full;     // q and d_out have landed
  Barrier item_free;     // they are used no more
  Barrier numbers_full;  // of the item
  Barrier scores_full;   // p and ds of a block are written
  Barrier scores_free;   // and used no more
  Barrier kv_free;       // the gradient of q has used a block's keys
};
static_assert(sizeof(SharedStorage) <= 227 * 1024);

template <class T>
__device__ inline std::uint32_t pack_pair(float first, float second) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
    return reinterpret_cast<const std::uint32_t&>(pair);
  } else {
    const __half2 pair = __floats2half2_rn(first, second);
    return reinterpret_cast<const std::uint32_t&>(pair);
  }
}

template <class T>
__device__ inline float2 unpack_pair(std::uint32_t pair) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(pair));
  } else {
    return __half22float2(reinterpret_cast<const __half2&>(pair));
  }
}

/// An item: 64 heads of a query.
struct Item {
  std::int64_t t;
  int first_head;
  int slots;   // that count
  int blocks;  // at least one
};
template <class T>
__device__ Item item_of(const Params<T>& params, int number) {
  Item item;
  item.t = number / params.head_blocks;
  item.first_head = number % params.head_blocks * kHeads;
  item.slots = params.lengths == nullptr ? params.topk
                                         : max(min(__ldg(params.lengths + item.t), params.topk), 0);
  item.blocks = max((item.slots + kBlock - 1) / kBlock, 1);
  return item;
}

/// The first slot of an item's block, counted over all rows.
template <class T>
__device__ std::int64_t first_slot_of(const Params<T>& params, int number, int block) {
  return std::int64_t{number / params.head_blocks} * params.topk + block * kBlock;
}

}  // namespace winnow::cuda::backward
