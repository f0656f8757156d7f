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
      : params_(params), shared_(shared) {}

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
  __device__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }
  __device__ static int warp() { return static_cast<int>(threadIdx.x) % kWarpgroup / 32; }

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
    slots_ =
        params_.lengths == nullptr ? params_.topk : min(__ldg(params_.lengths + t_), params_.topk);
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

  /// Gathers this warp's slice of a warpgroup's block, each part as soon as it is free. Eight lanes
  /// copy 128 bytes of a row at a time.
  template <int kSide>
  __device__ void copy_parts(int pair, const Block& block) {
    const int keys = warp() < 2 ? block.keys[0] : block.keys[1];
    const std::uint32_t valid = warp() < 2 ? block.valid[0] : block.valid[1];
    int rows[4];  // -1 where there is no key
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int slot = warp() % 2 * 16 + 4 * i + lane() / 8;
      const int key = __shfl_sync(0xffffffffu, keys, slot);
      rows[i] = (valid >> slot) & 1 ? key : -1;
    }
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      shared_.free[kSide][part][warp()].wait(pair - 1);
      copy_tiles<kHalfTiles>(shared_.blocks[kSide], (kSide + part) % 2 * kHalfTiles, rows);
      if (part == 1 && kTiles == kMaxTiles) {
        // P, of which every slice reads all rows, is in the rope tile.
        shared_.free[kSide][part][kSlices - 1].wait(pair - 1);
        copy_tiles<1>(shared_.blocks[kSide], kValueTiles, rows);
      }
      shared_.full[kSide][part].arrive_after_copies();
    }
  }

  /// Copies kCount tiles of this warp's rows, from tile `first` on.
  template <int kCount>
  __device__ void copy_tiles(const std::byte* block, int first, const int (&rows)[4]) const {
    const int piece = lane() % 8;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool is_key = rows[i] >= 0;
      const T* source = static_cast<const T*>(params_.kv) +
                        (is_key ? rows[i] : 0) * params_.kv_stride + first * kTileColumns +
                        piece * 8;
      const std::uint32_t target = shared_address(block) + first * kTileBytes +
                                   tile_offset(warp() * 16 + 4 * i + lane() / 8, piece);
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        copy_16_bytes(target + j * kTileBytes, source + j * kTileColumns, is_key);
      }
    }
  }

  /// Takes part in the barriers of a block that is not there.
  template <int kSide>
  __device__ void pass_parts(int pair) {
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      shared_.free[kSide][part][warp()].wait(pair - 1);
      shared_.full[kSide][part].arrive();
    }
  }

  const ForwardParameters& params_;
  SharedStorage& shared_;
  // The block whose indices are being loaded.
  int item_;
  int t_;
  int block_;  // of the item
  int slots_;
  bool item_has_keys_;  // in blocks before this one
  int keys_[2];
};

}  // namespace winnow::cuda::sparse_attention::forward_sm90
