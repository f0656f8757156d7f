// SPDX-License-Identifier: Apache-2.0
// The ring of key blocks that Hopper's kernels of index_target and dense_index_loss share: sizes,
// the split of channels and warpgroups, shared memory.
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
inline constexpr int kGroupWarps = kWarpgroup / 32;
inline constexpr int kThreads = 3 * kWarpgroup;

/// How the channels of a row and the warpgroups of a thread block are split.
template <int kTiles_, int kGroups_>
struct Shape {
  static constexpr int kTiles = kTiles_;    // of 64 channels
  static constexpr int kGroups = kGroups_;  // of heads, one a consumer warpgroup
  /// Each chunk of a stage's tiles has barriers of its own, so that it is refilled while later
  /// ones are multiplied.
  static constexpr int kChunkTiles = kTiles == 9 ? 3 : kTiles == 8 ? 4 : kTiles;
  static constexpr int kChunks = kTiles / kChunkTiles;
  static constexpr int kProducerThreads = kThreads - kGroups * kWarpgroup;
  static constexpr int kConsumerThreads = kGroups * kWarpgroup;
  static constexpr int kConsumerWarps = kConsumerThreads / 32;
  // A consumer keeps its Q, 144 registers a thread, and accumulators of 32.
  static constexpr int kConsumerRegisters = kGroups == 1 ? 240 : 216;
  static constexpr int kProducerRegisters = kGroups == 1 ? 128 : 72;
};

template <class Shape>
struct KeyRing {
  std::byte stages[kStages][Shape::kTiles * kTileBytes];
  Barrier full[kStages][Shape::kChunks];  // the chunk has landed
  Barrier free[kStages][Shape::kChunks];  // the consumers are done with it

  /// `arrivals`: of producers at each `full`, one more at the first chunk's if it has info.
  __device__ void init(int arrivals, bool has_info) {
    for (int stage = 0; stage < kStages; ++stage) {
      for (int chunk = 0; chunk < Shape::kChunks; ++chunk) {
        full[stage][chunk].init(arrivals + (has_info && chunk == 0 ? 1 : 0));
        free[stage][chunk].init(Shape::kConsumerThreads);
      }
    }
    fence_barrier_init();
  }
};

using PipelineState = hopper::PipelineState<kStages>;  // of blocks of keys

}  // namespace winnow::cuda::target_sm90
