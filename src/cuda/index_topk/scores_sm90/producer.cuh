// SPDX-License-Identifier: Apache-2.0
// The producer warp of index_topk's scores on sm_90.
#pragma once

#include <cstdint>

#include "cuda/hopper/tensor_copy.cuh"
#include "cuda/index_topk/parameters.cuh"
#include "cuda/index_topk/scores_sm90/shared.cuh"

namespace winnow::cuda::index_topk::sm90 {

/// One warp that finds the block's units, loads each group's weights, and has TMA copy its queries
/// and keys.
template <class T, int kHeads>
class Producer {
 public:
  __device__ Producer(const CUtensorMap& q, const CUtensorMap& k, const ScoreInputs& inputs,
                      const Plan& plan, int chunk, SharedStorage<T>& shared)
      : q_(q),
        k_(k),
        inputs_(inputs),
        plan_(plan),
        chunk_(chunk),
        shared_(shared),
        share_(plan, chunk, blockIdx.x, gridDim.x, lane_) {}

  __device__ void run() {
    Unit unit = unit_of_group();
    while (unit.end > 0) {
      load_queries(unit);
      // The next unit is looked up while keys are in flight.
      const int soon = min(unit.first + kStages<T>, unit.end);
      load_keys(unit, unit.first, soon);
      share_.next_group();
      const Unit next = unit_of_group();
      load_keys(unit, soon, unit.end);
      unit = next;
    }
    send_end();
  }

 private:
  static constexpr int kQueries = kColumns / kHeads;
  static constexpr int kTileColumnsOfT = kTileRowBytes / static_cast<int>(sizeof(T));

  /// The unit of the share's current group, empty after the last one; loads the group's weights.
  __device__ Unit unit_of_group() {
    if (share_.empty()) return {};
    const std::int64_t group = share_.group();
#pragma unroll
    for (int i = 0; i < kColumns / 32; ++i) {
      const Column<kHeads> column(i * 32 + lane_);
      const std::int64_t t = group * kQueries + column.query;
      const bool is_there = t < plan_.tokens && column.has_head(inputs_.heads);
      weights_[i] = is_there
                        ? inputs_.weights[t * inputs_.weights_stride + column.head(inputs_.heads)]
                        : 0.0f;
    }
    return {.group = group,
            .scores = plan_.scores_of_group(group, chunk_) - plan_.scores,
            .tiles = plan_.tiles(group),
            .first_key = plan_.first_key[group],
            .first = share_.first_tile_of_group(),
            .end = share_.end_tile_of_group()};
  }
  /// Every lane writes weights, so every lane waits and arrives. The queries come first because
  /// they take longest.
  __device__ void load_queries(const Unit& unit) {
    Barrier& full = shared_.queries_full[query_state_.stage];
    shared_.queries_free[query_state_.stage].wait(query_state_.phase - 1);
    if (lane_ == 0) {
      full.expect(sizeof(shared_.queries[0]));
      const auto first_row = static_cast<int>(unit.group * kQueries);
      for (int i = 0; i < kTiles<T>; ++i) {
        copy_box(shared_.queries[query_state_.stage].tiles[i], q_, full, i * kTileColumnsOfT, 0,
                 first_row, 0);
      }
      shared_.units[query_state_.stage] = unit;
    }
#pragma unroll
    for (int i = 0; i < kColumns / 32; ++i)
      shared_.weights[query_state_.stage][i * 32 + lane_] = weights_[i];
    full.arrive();
    query_state_.next();
  }
  /// Tells the consumers by a unit without tiles that there are no more.
  __device__ void send_end() {
    shared_.queries_free[query_state_.stage].wait(query_state_.phase - 1);
    if (lane_ == 0) shared_.units[query_state_.stage] = {};
    shared_.queries_full[query_state_.stage].arrive();
  }
  __device__ void load_keys(const Unit& unit, int first, int end) {
    if (lane_ == 0) {
      for (int tile = first; tile < end; ++tile, key_state_.next()) {
        Barrier& full = shared_.full[key_state_.stage];
        shared_.free[key_state_.stage].wait(key_state_.phase - 1);
        full.arrive_and_expect(sizeof(shared_.keys[0]));
        for (int i = 0; i < kTiles<T>; ++i) {
          copy_box(shared_.keys[key_state_.stage].tiles[i], k_, full, i * kTileColumnsOfT,
                   unit.first_key + tile * kTileKeys);
        }
      }
    }
    __syncwarp();
  }

  const CUtensorMap& q_;
  const CUtensorMap& k_;
  const ScoreInputs& inputs_;
  const Plan& plan_;
  const int chunk_;
  SharedStorage<T>& shared_;
  const int lane_ = static_cast<int>(threadIdx.x) % 32;
  Share share_;
  float weights_[kColumns / 32];
  PipelineState<kStages<T>> key_state_;
  PipelineState<kGroups> query_state_;
};

}  // namespace winnow::cuda::index_topk::sm90
