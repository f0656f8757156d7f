// SPDX-License-Identifier: Apache-2.0
// The gather of keys, and of Q before those of a row: the warps of one or two producer warpgroups
// copy equal numbers of a block's rows. They also write the zeros of the slots that no consumer
// sees.
#pragma once

#include <cstdint>

#include "cuda/hopper/gather.cuh"
#include "cuda/index_loss/index_target_sm90/shared.cuh"

namespace winnow::cuda::target_sm90 {

template <class T, class Shape>
class Producer {
 public:
  __device__ Producer(const Parameters& params, SharedStorage<Shape>& shared)
      : params_(params), shared_(shared) {}

  __device__ void run() {
    load_row(static_cast<int>(blockIdx.x));
    while (t_ < params_.tokens) {
      if (block_ == 0) copy_query();
      const std::uint32_t low = valid_slots(0);
      const std::uint32_t high = valid_slots(1);
      const BlockInfo info{{low, high}, block_ * kBlock, is_last()};
      // A block without keys is left out, except the last of a row, which ends it.
      const bool is_left_out = !is_last() && !(low | high);
      if (is_left_out) {
        clear_slots(info.first_slot, info.first_slot + kBlock);
      } else {
        find_rows(info);
      }
      next_block();  // its indices arrive during the copies of this one
      if (is_left_out) continue;
      copy_keys(info);
    }
  }

 private:
  static constexpr int kThreadRows = kBlock * 8 / Shape::kProducerThreads;  // eight lanes a row
  static constexpr int kWarpRows = 4 * kThreadRows;

  __device__ static int thread() { return static_cast<int>(threadIdx.x) - Shape::kConsumerThreads; }
  __device__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }
  /// The i-th row of a block that the calling lane copies to.
  __device__ static int row_of_block(int i) {
    return thread() / 32 * kWarpRows + 4 * i + lane() / 8;
  }
  __device__ bool is_last() const { return (block_ + 1) * kBlock >= slots_; }
  __device__ int slot(int half) const { return block_ * kBlock + 32 * half + lane(); }

  __device__ std::uint32_t valid_slots(int half) const {
    return __ballot_sync(0xffffffffu,
                         slot(half) < slots_ && static_cast<std::uint32_t>(keys_[half]) <
                                                    static_cast<std::uint32_t>(params_.keys));
  }

  __device__ void find_rows(const BlockInfo& info) {
    const bool is_high = row_of_block(0) >= 32;  // the rows of a warp are of one half
    const std::uint32_t valid = is_high ? info.valid[1] : info.valid[0];
    const int key = is_high ? keys_[1] : keys_[0];
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) {
      const int source_lane = row_of_block(i) % 32;
      const int row = __shfl_sync(0xffffffffu, key, source_lane);
      rows_[i] = valid >> source_lane & 1 ? row : -1;
    }
  }

  /// Each consumer warpgroup has a block of 64 heads.
  __device__ void copy_query() {
    const T* const q = static_cast<const T*>(params_.q) + t_ * params_.q_token_stride;
    for (int first_head = 0; first_head < Shape::kGroups * kGroupHeads; first_head += kGroupHeads) {
      int rows[kThreadRows];
#pragma unroll
      for (int i = 0; i < kThreadRows; ++i) {
        const int h = first_head + row_of_block(i);
        rows[i] = h < params_.heads.count ? h : -1;
      }
      copy(q, params_.q_head_stride, rows, [] {});
    }
  }

  __device__ void copy_keys(const BlockInfo& info) {
    copy(static_cast<const T*>(params_.kv), params_.kv_stride, rows_,
         [&] { shared_.info[state_.stage] = info; });
  }

  /// Copies rows of a tensor into the next stage; one thread calls `inform` once it is free.
  template <class Inform>
  __device__ void copy(const T* tensor, std::int64_t stride, const int (&rows)[kThreadRows],
                       const Inform& inform) {
    const std::uint32_t stage = shared_address(shared_.ring.stages[state_.stage]);
#pragma unroll
    for (int chunk = 0; chunk < Shape::kChunks; ++chunk) {
      Barrier& full = shared_.ring.full[state_.stage][chunk];
      shared_.ring.free[state_.stage][chunk].wait(state_.phase - 1);
      if (chunk == 0 && thread() == 0) {
        inform();
        full.arrive();
      }
#pragma unroll
      for (int i = 0; i < kThreadRows; ++i) {
        const bool is_there = rows[i] >= 0;
        const T* const source = tensor + (is_there ? rows[i] : 0) * stride + lane() % 8 * 8;
        const std::uint32_t target = stage + tile_offset(row_of_block(i), lane() % 8);
#pragma unroll
        for (int tile = chunk * Shape::kChunkTiles; tile < (chunk + 1) * Shape::kChunkTiles;
             ++tile) {
          copy_16_bytes(target + tile * kTileBytes, source + tile * kTileColumns, is_there);
        }
      }
      full.arrive_after_copies();
    }
    state_.next();
  }

  __device__ void next_block() {
    if (is_last()) {
      load_row(t_ + static_cast<int>(gridDim.x));
    } else {
      ++block_;
      load_keys();
    }
  }

  __device__ void load_row(int t) {
    t_ = t;
    if (t >= params_.tokens) return;
    block_ = 0;
    slots_ =
        params_.lengths == nullptr ? params_.topk : min(__ldg(params_.lengths + t), params_.topk);
    load_keys();
    // The slots behind the last block.
    clear_slots(max((slots_ + kBlock - 1) / kBlock, 1) * kBlock, params_.topk);
  }

  /// Issues the loads of the block's indices; the next block uses them.
  __device__ void load_keys() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      keys_[half] = slot(half) < params_.topk
                        ? __ldg(params_.indices + t_ * params_.indices_stride + slot(half))
                        : -1;
    }
  }

  __device__ void clear_slots(int first, int end) const {
    if (params_.adds) return;
    for (int slot = first + thread(); slot < end; slot += Shape::kProducerThreads) {
      params_.target[t_ * params_.target_stride + slot] = 0;
    }
  }

  const Parameters& params_;
  SharedStorage<Shape>& shared_;
  PipelineState state_;
  int t_;
  int block_;              // of the row
  int slots_;              // of the row that may hold a key
  int keys_[2];            // of the lane's slots in the two halves of the block
  int rows_[kThreadRows];  // of kv that the lane copies; -1: none
};

}  // namespace winnow::cuda::target_sm90
