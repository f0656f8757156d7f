// SPDX-License-Identifier: Apache-2.0
// The producer warp: q of a query row once, then its keys, block by block, with their d_scores.
#pragma once

#include <cstdint>

#include "cuda/hopper/gather.cuh"
#include "cuda/hopper/pipeline.cuh"
#include "cuda/index_topk/gradient_sm90/shared.cuh"

namespace winnow::cuda::gradient_sm90 {

template <class T, int kHeads>
class Producer {
 public:
  __device__ Producer(const Parameters<T>& params, std::int64_t t, const RowSlots& slots,
                      SharedStorage<T, kHeads>& shared)
      : params_(params),
        slots_(slots),
        q_(params.q + t * params.q_token_stride),
        d_scores_(params.d_scores + t * params.d_scores_stride),
        shared_(shared) {}

  /// Gathers `blocks` blocks.
  __device__ void run(int blocks) {
    load_slots(0);
    load_heads();
    PipelineState<kStages> pipeline;
#pragma unroll 1
    for (int block = 0; block < blocks; ++block) {
      shared_.free[pipeline.stage].wait(pipeline.phase - 1);
      gather(pipeline.stage);
      load_slots(block + 1);
      pipeline.next();
    }
    wait_for_own_copies();
  }

 private:
  static constexpr int kRowsAtOnce = 32 / 8;  // eight lanes copy 64 columns of a row

  /// Loads a block's keys and d_scores, two of each for a lane; using them here would stall.
  __device__ void load_slots(int block) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const std::int64_t slot = std::int64_t{block} * kBlock + i * 32 + lane();
      key_[i] = slots_.key(slot);
      d_score_[i] = slot < slots_.count ? __ldg(d_scores_ + slot) : 0;
    }
  }

  /// Starts to copy a row, zeros where it has no columns or is not valid.
  __device__ void copy_row(std::byte* tiles, int tile_bytes, int row, const T* from, bool valid) {
    const int piece = lane() % 8;
    const std::uint32_t to = shared_address(tiles) + tile_offset(row, piece);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const int column = tile * kTileColumns + piece * 8;
      copy_16_bytes(to + tile * tile_bytes, from + column, valid && column < params_.dim);
    }
  }

  __device__ void load_heads() {
#pragma unroll 4
    for (int h = lane() / 8; h < kHeads; h += kRowsAtOnce) {
      const bool has_head = h < params_.heads;
      copy_row(shared_.q[0], sizeof(shared_.q[0]), h,
               q_ + (has_head ? h : 0) * params_.q_head_stride, has_head);
    }
  }

  __device__ void gather(int stage) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (params_.zero_is_no_slot && d_score_[i] == 0) key_[i] = -1;
      shared_.keys[stage][i * 32 + lane()] = key_[i];
      shared_.d_scores[stage][i * 32 + lane()] = key_[i] < 0 ? 0 : d_score_[i];
    }
    shared_.slots_full[stage].arrive();
#pragma unroll
    for (int i = 0; i < kBlock / kRowsAtOnce; ++i) {
      const int row = i * kRowsAtOnce + lane() / 8;
      const std::int32_t key = __shfl_sync(0xffffffffu, key_[i * kRowsAtOnce / 32], row % 32);
      copy_row(shared_.k[stage][0], kTileBytes, row,
               params_.k + (key < 0 ? 0 : key) * params_.k_stride, key >= 0);
    }
    shared_.full[stage].arrive_after_copies();
  }

  const Parameters<T>& params_;
  const RowSlots& slots_;
  const T* const q_;
  const float* const d_scores_;
  SharedStorage<T, kHeads>& shared_;
  std::int32_t key_[2];  // of the next block; negative: none
  float d_score_[2];
};

}  // namespace winnow::cuda::gradient_sm90
