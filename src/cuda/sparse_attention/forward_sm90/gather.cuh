// SPDX-License-Identifier: Apache-2.0
// The gather of keys by the 8 warps of warpgroups 1 and 2: each warpgroup copies 24 rows of a
// block, each warp 6.
#pragma once

#include <cstdint>

#include "cuda/hopper/gather.cuh"
#include "cuda/sparse_attention/forward_sm90/shared.cuh"

namespace winnow::cuda::sparse_attention::forward_sm90 {

template <class T>
class Gatherer {
 public:
  __device__ explicit Gatherer(const ForwardParameters& params) : params_(params) {
    load_item(static_cast<int>(blockIdx.x));
  }

  /// Gathers the next block of this thread block's items into its stage, once that is free. Does
  /// nothing after the last block.
  template <int kTiles>
  __device__ void gather(SharedStorage& shared, PipelineState pipeline) {
    if (item_ >= params_.items) return;
    std::uint32_t valid = valid_slots(half(), key_);
    // A block without keys is skipped, except the last of an item, which ends it.
    while (!is_last() && !(valid | valid_slots(1 - half(), other_key_))) {
      ++block_;
      load_keys();
      valid = valid_slots(half(), key_);
    }
    shared.free[pipeline.stage].wait(pipeline.phase - 1);
    if (is_first_warp_of_half() && lane() == 0) {
      shared.info[pipeline.stage].valid[half()] = valid;
      if (half() == 0) shared.info[pipeline.stage].is_last = is_last();
      shared.full[pipeline.stage].arrive();
    }
    copy<kTiles>(shared_address(shared.stages[pipeline.stage]), valid);
    shared.full[pipeline.stage].arrive_after_copies();

    if (is_last()) {
      load_item(item_ + static_cast<int>(gridDim.x));
    } else {
      ++block_;
      load_keys();
    }
  }

 private:
  static constexpr int kHalf = kBlock / 2;
  __device__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }
  __device__ static int half() { return static_cast<int>(threadIdx.x) / kWarpgroup - 1; }
  __device__ static bool is_first_warp_of_half() {
    return static_cast<int>(threadIdx.x) % kWarpgroup < 32;
  }
  __device__ int slot(int half) const { return block_ * kBlock + half * kHalf + lane(); }
  __device__ bool is_last() const { return (block_ + 1) * kBlock >= slots_; }

  /// Which slots of a half hold a key, a bit each.
  __device__ std::uint32_t valid_slots(int half, int key) const {
    return __ballot_sync(0xffffffffu, lane() < kHalf && slot(half) < slots_ &&
                                          static_cast<std::uint32_t>(key) <
                                              static_cast<std::uint32_t>(params_.keys));
  }

  /// Eight lanes copy 128 bytes of a row at a time. A warp has six rows: four groups of lanes take
  /// one each, then two groups share each of the other two.
  template <int kTiles>
  __device__ void copy(std::uint32_t stage, std::uint32_t valid) const {
    const int group = lane() >> 3;
    copy_row<kTiles, 1>(stage, valid, group, 0);
    copy_row<kTiles, 2>(stage, valid, 4 + group / 2, group % 2);
  }

  /// Copies every kStep-th tile of one of this warp's rows.
  template <int kTiles, int kStep>
  __device__ void copy_row(std::uint32_t stage, std::uint32_t valid, int row_of_warp,
                           int first_tile) const {
    const int piece = lane() & 7;
    const int row_of_half =
        static_cast<int>(threadIdx.x) % kWarpgroup / 32 * (kBlock / 8) + row_of_warp;
    const int key = __shfl_sync(0xffffffffu, key_, row_of_half);
    const bool is_valid = (valid >> row_of_half) & 1;
    const T* source = static_cast<const T*>(params_.kv) + (is_valid ? key : 0) * params_.kv_stride +
                      piece * 8 + first_tile * kTileColumns;
    const std::uint32_t target =
        stage + tile_offset(half() * kHalf + row_of_half, piece) + first_tile * kTileBytes;
#pragma unroll
    for (int tile = 0; tile < kTiles; tile += kStep) {
      if (kStep == 1 || tile + first_tile < kTiles) {
        copy_16_bytes(target + tile * kTileBytes, source + tile * kTileColumns, is_valid);
      }
    }
  }

  __device__ void load_item(int item) {
    item_ = item;
    if (item >= params_.items) return;
    block_ = 0;
    t_ = item / params_.head_groups;
    slots_ =
        params_.lengths == nullptr ? params_.topk : min(__ldg(params_.lengths + t_), params_.topk);
    load_keys();
  }

  /// Issues the loads of this lane's indices of the block; the next call of `gather` uses them.
  __device__ void load_keys() {
    key_ = load_key(half());
    other_key_ = load_key(1 - half());
  }
  __device__ int load_key(int half) const {
    return lane() < kHalf && slot(half) < params_.topk
               ? __ldg(params_.indices + t_ * params_.indices_stride + slot(half))
               : -1;
  }

  const ForwardParameters& params_;
  int item_;
  int t_;
  int block_;  // of the item
  int slots_;
  int key_;        // of the half that this warpgroup copies
  int other_key_;  // of the other half, so that all warps agree which blocks have no keys
};

}  // namespace winnow::cuda::sparse_attention::forward_sm90
