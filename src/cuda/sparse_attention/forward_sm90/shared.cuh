// SPDX-License-Identifier: Apache-2.0
// What the warps of Hopper's forward kernel share: sizes and shared memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/common/mma.cuh"
#include "cuda/hopper/barrier.cuh"
#include "cuda/hopper/pipeline.cuh"
#include "cuda/hopper/wgmma.cuh"
#include "cuda/sparse_attention/lazy_maximum.cuh"
#include "cuda/sparse_attention/parameters.cuh"

namespace winnow::cuda::sparse_attention::forward_sm90 {

using namespace winnow::hopper;

inline constexpr int kHeads = 64;      // of one item
inline constexpr int kBlock = 48;      // keys of a stage
inline constexpr int kValueTiles = 8;  // 512 channels
inline constexpr int kStageTiles = 9;
inline constexpr int kTileBytes = kBlock * kTileRowBytes;
inline constexpr int kQueryTileBytes = kHeads * kTileRowBytes;
inline constexpr int kRegisterTiles = 5;         // of Q; the others are in shared memory
inline constexpr int kSliceBytes = kHeads * 32;  // 16 columns of P
inline constexpr int kStages = 3;
inline constexpr int kWarpgroup = 128;
inline constexpr int kThreads = 3 * kWarpgroup;
inline constexpr int kGatherThreads = 2 * kWarpgroup;
inline constexpr int kRegisters = 168;
// Steps of the softmax between the products of two tiles. The sooner P is ready, the sooner its
// stage is free for the gather; but products must be issued often enough to keep the tensor cores
// busy.
inline constexpr int kStepsPerTile = 3;
/// What the gathering warps tell the others about a block of keys.
struct BlockInfo {
  std::uint32_t valid[2];  // bit j of half i: slot 24 i + j of the block holds a key
  bool is_last;            // whether it is the last block of its item
};

struct SharedStorage {
  std::byte stages[kStages][kStageTiles * kTileBytes];
  std::byte q[kStageTiles - kRegisterTiles][kQueryTileBytes];
  float rescale[kStages][kHeads];  // by which out so far is multiplied
  float finish[kStages][kHeads];   // with the last block: by which out is multiplied at the end
  BlockInfo info[kStages];
  bool rescales[kStages][4];  // per warp: whether any of its rows is rescaled
  Barrier full[kStages];
  Barrier ready[kStages];
  Barrier free[kStages];
};
static_assert(sizeof(SharedStorage) <= 227 * 1024);

using PipelineState = hopper::PipelineState<kStages>;  // of blocks of keys

}  // namespace winnow::cuda::sparse_attention::forward_sm90
