// SPDX-License-Identifier: Apache-2.0
// The general forward kernel's work for one query row and one group of heads: the schedule of score
// warps and value warps. The map is at the head of forward_general.cu.
#pragma once

#include <cstdint>

#include "cuda/common/block_barrier.cuh"
#include "cuda/sparse_attention/forward_general/gather.cuh"
#include "cuda/sparse_attention/forward_general/scores.cuh"
#include "cuda/sparse_attention/forward_general/values.cuh"
#include "cuda/sparse_attention/large_logits.cuh"

namespace winnow::cuda::sparse_attention::forward_general {

template <class Shape>
class RowAttention {
 public:
  using T = typename Shape::T;
  using Storage = typename Shape::Storage;

  __device__ RowAttention(const ForwardParameters& parameters, unsigned char* memory)
      : parameters_(parameters),
        shared_(*reinterpret_cast<Storage*>(memory)),
        tiles_(parameters, memory) {
    clear_channels();
  }

  __device__ void run() {
    const auto [t, first_head] = item();
    int slots = parameters_.topk;
    if (parameters_.lengths != nullptr) slots = max(0, min(slots, parameters_.lengths[t]));
    const int tiles = slots / Shape::kKeys + (slots % Shape::kKeys != 0 ? 1 : 0);
    load_queries(t, first_head);
    if (warp() < Shape::kScoreWarps) {
      run_scores(tiles);
    } else {
      run_values(t, first_head, slots, tiles);
    }
    wait_for_block<Shape::kThreads>();  // out of all rows is written
    const Item again = item();
    attend_marked_heads<T, Shape::kHeads, Shape::kThreads / 32>(
        parameters_, again.t, again.first_head, shared_.normalizer);
  }

 private:
  struct Item {
    std::int64_t t;
    int first_head;
  };
  /// The block's item. It is made where it is needed, by an instruction that the compiler may not
  /// merge with another: kept through the loop over tiles, it would be spilled.
  __device__ Item item() const {
    unsigned item;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(item));
    const auto groups = static_cast<unsigned>(parameters_.head_groups);
    return {item / groups, static_cast<int>(item % groups) * Shape::kHeads};
  }

  // In interval i the scores of tile i are made, the values of tile i - 1 are added, and the rows
  // of tile i + 1 arrive (with four stages they were started in interval i - 1, else in this one).
  // A barrier ends it: P of tile i and the rows of tile i + 1 are there; P and rows of tile i - 1
  // have been used.
  __device__ void run_scores(int tiles) {
    ScoreWarp<Shape> scores(parameters_, shared_, tiles_, warp(), lane());
    wait_for_copies<0>();
    wait_for_block<Shape::kThreads>();  // Q and the rows of tile 0 are there
    scores.load_queries();
    for (int tile = 0; tile < tiles; ++tile) {
      scores.attend(tile);
      wait_for_block<Shape::kThreads>();
    }
    const auto [t, first_head] = item();
    scores.finish(t, first_head);
    wait_for_block<Shape::kThreads>();  // the normalizers are there
  }

  __device__ void run_values(std::int64_t t, int first_head, int slots, int tiles) {
    ValueWarp<Shape> values(parameters_, shared_, tiles_, warp() - Shape::kScoreWarps, lane());
    Gather<Shape> gather(parameters_, t, slots, thread() - Shape::kScoreWarps * 32);
    const int ahead = tiles_.stages == 4 ? 2 : 1;
    for (int tile = 0; tile < ahead; ++tile) gather.start(tile, tiles_, shared_.key);
    wait_for_next_tile();
    wait_for_block<Shape::kThreads>();  // Q and the rows of tile 0 are there
    for (int tile = 0; tile <= tiles; ++tile) {
      if (tiles_.stages > 2) gather.start(tile + ahead, tiles_, shared_.key);
      if (tile > 0) values.add(tile - 1);
      if (tiles_.stages == 2) {
        // All value warps are done with tile - 1, in whose place tile + 1 comes.
        asm volatile("bar.sync 1, %0;" ::"n"(Shape::kValueThreads) : "memory");
        gather.start(tile + 1, tiles_, shared_.key);
      }
      wait_for_next_tile();
      wait_for_block<Shape::kThreads>();
    }
    values.store(t, first_head);
  }

  /// Waits for this thread's copies of all tiles but the last where they go two tiles ahead.
  __device__ void wait_for_next_tile() const {
    if (tiles_.stages == 4) {
      wait_for_copies<1>();
    } else {
      wait_for_copies<0>();
    }
  }

  __device__ static int thread() { return static_cast<int>(threadIdx.x); }
  __device__ static int warp() { return static_cast<int>(threadIdx.x / 32); }
  __device__ static int lane() { return static_cast<int>(threadIdx.x % 32); }

  /// The products read channels up to a multiple of 16: those past qk_dim are zero, in all rows and
  /// for good. The first barrier makes them visible.
  __device__ void clear_channels() {
    if (padded_dim(parameters_.qk_dim) == parameters_.qk_dim) return;
    for (int i = thread(); i < Shape::kHeads + tiles_.stages * Shape::kKeys; i += Shape::kThreads) {
      const int key = i - Shape::kHeads;
      const std::uint32_t row = key < 0 ? tiles_.q + i * tiles_.row_bytes
                                        : tiles_.kv + key / Shape::kKeys * tiles_.stage_bytes +
                                              key % Shape::kKeys * tiles_.row_bytes;
      *reinterpret_cast<uint4*>(element_at<T>(row) + parameters_.qk_dim) = uint4{};
    }
  }

  __device__ void load_queries(std::int64_t t, int first_head) {
    const T* const q = static_cast<const T*>(parameters_.q) + t * parameters_.q_token_stride;
    for (int row = thread() / kLanesPerRow; row < Shape::kHeads;
         row += Shape::kThreads / kLanesPerRow) {
      const int h = first_head + row;
      copy_row(element_at<T>(tiles_.q + row * tiles_.row_bytes),
               h < parameters_.heads ? q + h * parameters_.q_head_stride : nullptr,
               parameters_.qk_dim, parameters_.q_aligned, thread() % kLanesPerRow);
    }
    commit_copies();
  }

  const ForwardParameters& parameters_;
  Storage& shared_;
  Tiles<Shape> tiles_;
};

}  // namespace winnow::cuda::sparse_attention::forward_general
