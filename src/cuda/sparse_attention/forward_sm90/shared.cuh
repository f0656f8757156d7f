// SPDX-License-Identifier: Apache-2.0
// What the warps of sparse_attention_forward share: sizes, arguments, shared memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/hopper/barrier.cuh"
#include "cuda/hopper/wgmma.cuh"

namespace winnow::cuda::forward {

using namespace winnow::hopper;

inline constexpr int kHeads = 64;      // of one item
inline constexpr int kBlock = 48;      // keys
inline constexpr int kValueTiles = 8;  // 512 channels
inline constexpr int kStageTiles = 9;
inline constexpr int kTileBytes = kBlock * kTileRowBytes;
inline constexpr int kQueryTileBytes = kHeads * kTileRowBytes;
inline constexpr int kRegisterTiles = 5;         // of Q; those behind are in shared memory
inline constexpr int kSliceBytes = kHeads * 32;  // 16 columns of P
inline constexpr int kStages = 3;
inline constexpr int kWarpgroup = 128;
inline constexpr int kThreads = 3 * kWarpgroup;
inline constexpr int kGatherThreads = 2 * kWarpgroup;
inline constexpr int kRegisters = 168;
// Steps of the softmax between the products of two tiles. The sooner P is ready, the sooner its
// stage is free for the gather; but products must be started often enough to keep the matrix units
// busy.
inline constexpr int kStepsPerTile = 3;
// The running maximum is left as it is until a score passes it by this much (log2): P then stays
// below 2^8, and out is seldom rescaled.
inline constexpr float kLazyMaximum = 8;
inline constexpr float kLog2e = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;

template <class T>
struct Params {
  const T* q;
  const T* kv;
  const std::int32_t* indices;
  const std::int32_t* lengths;  // null: all slots count
  const float* sink;            // null: none
  T* out;
  float* lse;
  float* max_logits;  // null: not asked for
  std::int64_t q_row, q_head, kv_row, indices_row, out_row, out_head, lse_row, max_logits_row;
  int heads, keys, topk, head_blocks, items;
  float scale_log2;
};

/// One block of keys, as the gathering warps tell the others.
struct BlockInfo {
  std::uint32_t valid[2];  // bit j of half i: slot 24 i + j of the block holds a key
  bool is_last;            // of its item
};

struct SharedStorage {
  std::byte stages[kStages][kStageTiles * kTileBytes];
  std::byte q[kStageTiles - kRegisterTiles][kQueryTileBytes];
  float rescale[kStages][kHeads];  // what out of before is multiplied by
  float finish[kStages][kHeads];   // the last block: what out is multiplied by in the end
  BlockInfo info[kStages];
  bool rescales[kStages][4];  // per warp: does any of its rows rescale?
  Barrier full[kStages];
  Barrier ready[kStages];
  Barrier free[kStages];
};
static_assert(sizeof(SharedStorage) <= 227 * 1024);

__device__ inline float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

template <class T>
__device__ inline std::uint32_t pack(float low, float high) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const std::uint32_t*>(&pair);
  } else {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const std::uint32_t*>(&pair);
  }
}

/// The stage of a block of keys, and how often that stage was used before.
struct Turn {
  int stage = 0;
  int round = 0;
  __device__ void next() {
    if (++stage == kStages) {
      stage = 0;
      ++round;
    }
  }
};

}  // namespace winnow::cuda::forward
