// SPDX-License-Identifier: Apache-2.0
// The producer warpgroup of a team: Q of the items, and the gather of the team's keys.
#pragma once

#include <cstdint>

#include "cuda/hopper/gather.cuh"
#include "cuda/sparse_attention/forward_few_heads_sm90/shared.cuh"

namespace winnow::cuda::sparse_attention::forward_few_heads {

/// Copies 16 bytes of each tile of a row, or zeros.
template <int kTiles, class T>
__device__ void copy_pieces(std::uint32_t target, int tile_bytes, const T* source, bool is_there) {
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    copy_16_bytes(target + tile * tile_bytes, source + tile * kTileColumns, is_there);
  }
}

template <class T, int kTiles>
class Gatherer {
 public:
  __device__ Gatherer(const ForwardParameters& params, SharedStorage& shared, int team)
      : params_(params), shared_(shared), team_(team) {}

  __device__ void run() {
    int item = static_cast<int>(blockIdx.x);
    int slots = slots_of(params_, item);
    int key = load_key(item, 0, slots);
    for (int i = 0; item < params_.items; ++i) {
      if (team_ == 0) copy_query(item, i);
      const int next_item = item + static_cast<int>(gridDim.x);
      const int next_slots = slots_of(params_, next_item);
      const int blocks = blocks_of(slots, team_);
      for (int block = 0; block < blocks; ++block) {
        // Issued before the copies of this block; the next one uses it.
        const int next_key = block + 1 < blocks ? load_key(item, block + 1, slots)
                                                : load_key(next_item, 0, next_slots);
        gather(key);
        key = next_key;
      }
      if (blocks == 0) key = load_key(next_item, 0, next_slots);
      item = next_item;
      slots = next_slots;
    }
  }

 private:
  __device__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }
  __device__ static int warp() { return static_cast<int>(threadIdx.x) % kWarpgroup / 32; }

  /// Loads the key of this lane's slot, -1 for none. A warp has 16 rows of a block.
  __device__ int load_key(int item, int block, int slots) const {
    const int slot = (block * kTeams + team_) * kBlock + warp() * 16 + lane();
    if (lane() >= 16 || slot >= slots) return -1;
    return __ldg(params_.indices + item * params_.indices_stride + slot);
  }

  /// Copies Q of the i-th item, once its buffer is free.
  __device__ void copy_query(int item, int i) {
    shared_.q_free[i % 2].wait(i / 2 - 1);
    const int row = static_cast<int>(threadIdx.x) % kWarpgroup / 8;
    const int piece = lane() % 8;
    const bool is_there = row < params_.heads;
    copy_pieces<kTiles>(shared_address(shared_.q[i % 2]) + tile_offset(row, piece), kQueryTileBytes,
                        static_cast<const T*>(params_.q) + item * params_.q_token_stride +
                            (is_there ? row : 0) * params_.q_head_stride + piece * 8,
                        is_there);
    shared_.q_full[i % 2].arrive_after_copies();
  }

  /// Gathers the team's next block. Each warp has 16 keys, and waits until they are free; eight
  /// lanes copy a row.
  __device__ void gather(int key) {
    const bool is_key = static_cast<std::uint32_t>(key) < static_cast<std::uint32_t>(params_.keys);
    const std::uint32_t valid = __ballot_sync(0xffffffffu, is_key);
    shared_.free[team_][warp()].wait(gathered_ - 1);
    ++gathered_;
    if (lane() == 0) {
      shared_.valid[team_][warp()] = valid;
      shared_.full[team_].arrive();
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = 4 * i + lane() / 8;  // of the warp
      const int piece = lane() % 8;
      const std::int64_t row_key = __shfl_sync(0xffffffffu, is_key ? key : 0, row);
      copy_pieces<kTiles>(
          shared_address(shared_.stages[team_]) + tile_offset(warp() * 16 + row, piece), kTileBytes,
          static_cast<const T*>(params_.kv) + row_key * params_.kv_stride + piece * 8,
          (valid >> row) & 1);
    }
    shared_.full[team_].arrive_after_copies();
  }

  const ForwardParameters& params_;
  SharedStorage& shared_;
  int team_;
  int gathered_ = 0;  // blocks
};

}  // namespace winnow::cuda::sparse_attention::forward_few_heads
