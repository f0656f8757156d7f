// SPDX-License-Identifier: Apache-2.0
// The producer warpgroup: finds the blocks of keys of all items, hands them out in pairs and
// gathers them. Each warp copies a slice, 16 rows of every block.
#pragma once

#include <cstdint>

#include "cuda/hopper/gather.cuh"
#include "cuda/sparse_attention/forward_sm90/shared.cuh"

namespace winnow::cuda::sparse_attention::forward_sm90 {

template <class T, int kTiles>
class Gatherer {
 public:
  __device__ Gatherer(const ForwardParameters& params, SharedStorage& shared)
      : params_(params), shared_(shared) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      targets_[i] = shared_address(shared.blocks) + tile_offset(slot(i), lane() % 8);
    }
  }

  __device__ void run() {
    load_item(static_cast<int>(blockIdx.x));
    Block block = next_block();
    bool is_first = true;
    for (int pair = 0;; ++pair) {
      if (block.item >= params_.items) {
        publish<0>(pair, block, kEnd);
        publish<1>(pair, block, kEnd);
        return;
      }
      const std::uint32_t first = is_first ? kFirst : 0;
      Block next = next_block();
      publish<0>(pair, block, first);
      copy_parts<0>(pair, block);
      if (next.item == block.item) {
        block = next;
        next = next_block();
        is_first = next.item != block.item;
        publish<1>(pair, block, first | (is_first ? kLast : 0));
        copy_parts<1>(pair, block);
      } else {
        is_first = true;
        publish<1>(pair, block, first | kLast | kEmpty);
        pass_parts<1>(pair);
      }
      block = next;
    }
  }

 private:
  static constexpr int kSliceKeys = kBlock / kSlices;
  static constexpr int kRows = kSliceKeys / 4;  // of a block that a lane takes part in

  __device__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }
  __device__ static int warp() { return static_cast<int>(threadIdx.x) % kWarpgroup / 32; }

  /// The slot of this lane's row i of a block. Eight lanes copy 128 bytes of a row at a time.
  __device__ static int slot(int i) { return warp() * kSliceKeys + 4 * i + lane() / 8; }

  /// A block that has keys, or the only one of an item without keys. All warps know all of it.
  struct Block {
    std::int32_t item;
    std::int32_t keys[2];    // of this lane's slots, lane and 32 + lane
    std::uint32_t valid[2];  // bit j of word i: slot 32 i + j holds a key
  };

  /// The next block of this thread block's items; past the last one its item is no item.
  __device__ Block next_block() {
    while (item_ < params_.items) {
      const Block block = {item_,
                           {keys_[0], keys_[1]},
                           {valid_slots(keys_[0], lane()), valid_slots(keys_[1], 32 + lane())}};
      const bool is_last = (block_ + 1) * kBlock >= slots_;
      const bool has_keys = (block.valid[0] | block.valid[1]) != 0;
      const bool is_taken = has_keys || (is_last && !item_has_keys_);
      item_has_keys_ = item_has_keys_ || has_keys;
      if (is_last) {
        load_item(item_ + static_cast<int>(gridDim.x));
      } else {
        ++block_;
        load_keys();
      }
      if (is_taken) return block;
    }
    return {item_, {-1, -1}, {0, 0}};
  }

  __device__ std::uint32_t valid_slots(int key, int slot) const {
    return __ballot_sync(0xffffffffu, block_ * kBlock + slot < slots_ &&
                                          static_cast<std::uint32_t>(key) <
                                              static_cast<std::uint32_t>(params_.keys));
  }

  __device__ void load_item(int item) {
    item_ = item;
    if (item >= params_.items) return;
    block_ = 0;
    item_has_keys_ = false;
    t_ = item / params_.head_groups;
    slots_ = slots_of_row(params_, t_);
    load_keys();
  }

  /// Issues the loads of this lane's indices of the block; the next call of next_block uses them.
  __device__ void load_keys() {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int slot = block_ * kBlock + 32 * i + lane();
      keys_[i] =
          slot < params_.topk ? __ldg(params_.indices + t_ * params_.indices_stride + slot) : -1;
    }
  }

  /// The infos of two pairs ago have been read: since then both warpgroups have freed a block.
  template <int kSide>
  __device__ void publish(int pair, const Block& block, std::uint32_t flags) {
    if (threadIdx.x % kWarpgroup != 0) return;
    shared_.info[kSide][pair % 2] = {{block.valid[0], block.valid[1]}, block.item, flags};
    shared_.info_full[kSide][pair % 2].arrive();
  }

  /// A row to be copied.
  struct Row {
    const T* source;  // of this lane's piece of tile 0
    bool is_key;      // otherwise zeros are written
  };

  /// Gathers this warp's slice of a warpgroup's block, each part as soon as it is free. Addresses
  /// are made before the waits: a part that is free must not wait for them.
  template <int kSide>
  __device__ void copy_parts(int pair, const Block& block) {
    const int keys = warp() < 2 ? block.keys[0] : block.keys[1];
    const std::uint32_t valid = warp() < 2 ? block.valid[0] : block.valid[1];
    Row rows[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int key = __shfl_sync(0xffffffffu, keys, slot(i) % 32);
      rows[i].is_key = (valid >> (slot(i) % 32)) & 1;
      rows[i].source = static_cast<const T*>(params_.kv) +
                       (rows[i].is_key ? key : 0) * params_.kv_stride + lane() % 8 * 8;
    }
    shared_.free[kSide][0][warp()].wait(pair - 1);
    copy_tiles<kSide, 0, kHalfTiles>(rows);
    shared_.full[kSide][0].arrive_after_copies();
    shared_.free[kSide][1][warp()].wait(pair - 1);
    copy_tiles<kSide, kHalfTiles, kEarlyTiles>(rows);
    shared_.full[kSide][1].arrive_after_copies();
    copy_tiles<kSide, kEarlyTiles, kValueTiles>(rows);
    if constexpr (kTiles == kMaxTiles) {
      // P, of which every slice reads all rows, is in the rope tile.
      shared_.free[kSide][1][kSlices - 1].wait(pair - 1);
      copy_tiles<kSide, kValueTiles, kMaxTiles>(rows);
    }
    shared_.full[kSide][2].arrive_after_copies();
  }

  /// Copies tiles of this warp's rows.
  template <int kSide, int kBegin, int kEnd>
  __device__ void copy_tiles(const Row (&rows)[kRows]) const {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      // Rows 8 apart have the same swizzle.
      const std::uint32_t target =
          targets_[i % 2] + i / 2 * 8 * kTileRowBytes + kSide * kMaxTiles * kTileBytes;
#pragma unroll
      for (int j = kBegin; j < kEnd; ++j) {
        const int tile = tile_of<kSide>(j);
        copy_16_bytes(target + tile * kTileBytes, rows[i].source + tile * kTileColumns,
                      rows[i].is_key);
      }
    }
  }

  /// Takes part in the barriers of a block that is not there.
  template <int kSide>
  __device__ void pass_parts(int pair) {
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      shared_.free[kSide][part][warp()].wait(pair - 1);
    }
    for (Barrier& full : shared_.full[kSide]) full.arrive();
  }

  const ForwardParameters& params_;
  SharedStorage& shared_;
  std::uint32_t targets_[2];  // of this lane's rows 0 and 1 in tile 0 of warpgroup 0's block
  // The block whose indices are being loaded.
  int item_;
  int t_;
  int block_;  // of the item
  int slots_;
  bool item_has_keys_;  // in blocks before this one
  int keys_[2];
};

}  // namespace winnow::cuda::sparse_attention::forward_sm90
