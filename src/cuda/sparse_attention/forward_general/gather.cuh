// SPDX-License-Identifier: Apache-2.0
// The general forward kernel's shared memory, and the gather of keys into it.
#pragma once

#include <cstdint>

#include "cuda/common/mma.cuh"
#include "cuda/sparse_attention/copy_row.cuh"
#include "cuda/sparse_attention/parameters.cuh"

namespace winnow::cuda::sparse_attention::forward_general {

inline constexpr int kMaxTileKeys = 64;
inline constexpr int kBlockKeys = 16;                         // keys that one warp scores
inline constexpr int kKeyBlocks = kMaxTileKeys / kBlockKeys;  // warps that share a tile's heads
inline constexpr int kMaxStages = 2;

/// The tiles of q [kHeads, row_elements] and kv [stages, tile_keys, row_elements] follow it.
template <class T, int kHeads>
struct alignas(16) SharedStorage {
  T p[kHeads][kMaxTileKeys + kRowPadding];
  std::int32_t key[kMaxStages][kMaxTileKeys];  // the key of each slot; -1: none
  float partial[kKeyBlocks][kHeads];  // of a tile's 16 keys: the largest score; at last the sum
  float factor[kHeads];               // by which the accumulators of out are rescaled
  float largest[kHeads];
};

__host__ __device__ constexpr int padded_dim(int qk_dim) { return (qk_dim + 15) / 16 * 16; }
__host__ __device__ constexpr int row_elements(int qk_dim) {
  return padded_dim(qk_dim) + kRowPadding;
}

/// Gathers the rows of one query's keys, tile by tile.
template <class T, int kThreads>
class Gather {
 public:
  __device__ Gather(const ForwardParameters& parameters, const std::int32_t* indices, int slots)
      : parameters_(parameters), indices_(indices), slots_(slots) {
    load_keys(0);
  }

  /// Copies the rows of a tile, whose keys were loaded one tile ago, and loads the next tile's
  /// keys.
  __device__ void start(int tile, T* rows, std::int32_t* keys) {
    const T* const kv = static_cast<const T*>(parameters_.kv);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int row = group_ + i * kGroups;
      if (row >= parameters_.tile_keys) break;
      const T* const from = next_[i] < 0 ? nullptr : kv + next_[i] * parameters_.kv_stride;
      copy_row(rows + row * row_elements(parameters_.qk_dim), from, parameters_.qk_dim,
               parameters_.kv_aligned, lane_);
      if (lane_ == 0) keys[row] = next_[i];
    }
    commit_copies();
    load_keys(tile + 1);
  }

 private:
  static constexpr int kGroups = kThreads / kLanesPerRow;
  static constexpr int kRows = kMaxTileKeys / kGroups;

  __device__ void load_keys(int tile) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int row = group_ + i * kGroups;
      const std::int64_t slot = std::int64_t{tile} * parameters_.tile_keys + row;
      next_[i] = -1;
      if (row < parameters_.tile_keys && slot < slots_) {
        const std::int32_t key = indices_[slot];
        if (key >= 0 && key < parameters_.keys) next_[i] = key;
      }
    }
  }

  const ForwardParameters& parameters_;
  const std::int32_t* indices_;
  int slots_;
  int group_ = static_cast<int>(threadIdx.x) / kLanesPerRow;
  int lane_ = static_cast<int>(threadIdx.x) % kLanesPerRow;
  std::int32_t next_[kRows];
};

}  // namespace winnow::cuda::sparse_attention::forward_general
