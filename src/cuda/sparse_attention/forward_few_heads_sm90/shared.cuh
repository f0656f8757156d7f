// SPDX-License-Identifier: Apache-2.0
// What the warps of Hopper's forward kernel for few heads share: sizes and shared memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/hopper/barrier.cuh"
#include "cuda/hopper/wgmma.cuh"
#include "cuda/sparse_attention/lazy_maximum.cuh"
#include "cuda/sparse_attention/parameters.cuh"

namespace winnow::cuda::sparse_attention::forward_few_heads {

using namespace winnow::hopper;

inline constexpr int kHeads = 16;      // of one item
inline constexpr int kBlock = 64;      // keys
inline constexpr int kValueTiles = 8;  // 512 channels
inline constexpr int kMaxTiles = 9;
inline constexpr int kTileBytes = kBlock * kTileRowBytes;
inline constexpr int kQueryTileBytes = kHeads * kTileRowBytes;
inline constexpr int kWarpgroup = 128;
inline constexpr int kTeams = 2;
inline constexpr int kThreads = 2 * kTeams * kWarpgroup;
inline constexpr int kMathRegisters = 168;
inline constexpr int kGatherRegisters = 80;

/// Accumulators of out^T: 64 channels by 16 heads a tile.
using OutTile = float[8];

struct SharedStorage {
  std::byte stages[kTeams][kMaxTiles * kTileBytes];
  std::byte q[2][kMaxTiles * kQueryTileBytes];  // of even and odd items; at the end out
  std::byte p[kTeams][kQueryTileBytes];         // [heads, keys of a block]
  // The accumulators that the other team finishes, four of a thread at a time.
  float4 out[kTeams][kValueTiles][kWarpgroup];
  RowState totals[kTeams][kHeads];
  float exchange[kTeams][4][kHeads];  // per warp: maxima, at the end sums
  std::uint32_t valid[kTeams][4];     // bit j of word w: slot 16 w + j of the block holds a key
  Barrier full[kTeams];
  Barrier free[kTeams][4];  // of 16 keys of a stage
  Barrier q_full[2], q_free[2];
  Barrier sums_full;          // both teams' `totals` and `out` of an item are written
  Barrier sums_free[kTeams];  // the other team has read those of this one
};
static_assert(sizeof(SharedStorage) <= 227 * 1024);

/// The slots of an item that count.
__device__ inline int slots_of(const ForwardParameters& params, int item) {
  if (item >= params.items) return 0;
  return params.lengths == nullptr ? params.topk : min(__ldg(params.lengths + item), params.topk);
}

/// The blocks of an item that a team has: every second one.
__device__ inline int blocks_of(int slots, int team) {
  const int blocks = (max(slots, 0) + kBlock - 1) / kBlock;
  return (blocks + kTeams - 1 - team) / kTeams;
}

}  // namespace winnow::cuda::sparse_attention::forward_few_heads
