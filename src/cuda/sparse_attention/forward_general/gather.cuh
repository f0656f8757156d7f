// SPDX-License-Identifier: Apache-2.0
// The general forward kernel's shapes, its shared memory, and the gather of keys into it.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/common/mma.cuh"
#include "cuda/sparse_attention/copy_row.cuh"
#include "cuda/sparse_attention/parameters.cuh"
#include "cuda/sparse_attention/score_product.cuh"

namespace winnow::cuda::sparse_attention::forward_general {

inline constexpr int kMaxStages = 4;
inline constexpr unsigned kAllLanes = 0xffffffffu;

/// kHeads: of a block, 16 a score warp. kKeys: of a tile. kPairs: blocks of 16 columns of the
/// values that a value warp has, for up to 32 heads.
template <class Element, int kHeadCount, int kTileKeys, int kValueWarpCount, int kPairCount>
struct Shape {
  using T = Element;
  static constexpr int kHeads = kHeadCount;
  static constexpr int kKeys = kTileKeys;
  static constexpr int kPairs = kPairCount;
  static constexpr int kScoreWarps = kHeads / 16;
  static constexpr int kValueWarps = kValueWarpCount;
  static constexpr int kValueThreads = kValueWarps * 32;
  static constexpr int kThreads = kScoreWarps * 32 + kValueThreads;
  static constexpr int kValueHeads = kHeads < 32 ? kHeads : 32;  // of a value warp
  static constexpr int kColumnWarps = kValueWarps / (kHeads / kValueHeads);
  // A value warp has whole groups of columns, every kColumnWarps-th one.
  static constexpr int kGroupPairs = kPairs < 4 ? kPairs : 4;
  static constexpr int kGroupColumns = kGroupPairs * 16;
  static constexpr int kGroups = kPairs / kGroupPairs;

  /// What score warps give to value warps, of this tile and of the next. The tiles of q [kHeads,
  /// row_elements] and kv [stages, stage_elements] follow it.
  struct alignas(16) Storage {
    T p[2][kHeads][kKeys + kRowPadding];
    float factor[2][kHeads];              // of a row that has moved
    std::int32_t moved[2][kScoreWarps];   // whether a row of 16 has
    std::int32_t key[kMaxStages][kKeys];  // the key of each slot; -1: none
    float normalizer[kHeads];
  };
};

__host__ __device__ constexpr int padded_dim(int qk_dim) { return (qk_dim + 15) / 16 * 16; }
__host__ __device__ constexpr int row_elements(int qk_dim) {
  return padded_dim(qk_dim) + kRowPadding;
}
/// A value warp reads whole groups of columns, which may end past a stage's last row.
template <class Shape>
__host__ __device__ constexpr int stage_elements(int qk_dim, int v_dim) {
  const int columns =
      (v_dim + Shape::kGroupColumns - 1) / Shape::kGroupColumns * Shape::kGroupColumns;
  const int row = row_elements(qk_dim);
  return Shape::kKeys * row + (columns > row ? columns - row : 0);
}

/// The tiles of a block as addresses in shared memory; sizes are in bytes.
template <class Shape>
struct Tiles {
  using T = typename Shape::T;

  __device__ Tiles(const ForwardParameters& parameters, const unsigned char* memory)
      : row_bytes(row_elements(parameters.qk_dim) * static_cast<int>(sizeof(T))),
        stages(parameters.stages),
        stage_bytes(stage_elements<Shape>(parameters.qk_dim, parameters.v_dim) *
                    static_cast<int>(sizeof(T))),
        q(shared_address(memory + sizeof(typename Shape::Storage))),
        kv(q + Shape::kHeads * row_bytes) {}

  /// `tile` >= 0.
  __device__ int stage_of(int tile) const { return stages == 3 ? tile % 3 : tile & (stages - 1); }
  __device__ std::uint32_t rows_of(int tile) const { return kv + stage_of(tile) * stage_bytes; }

  int row_bytes;
  int stages, stage_bytes;
  std::uint32_t q, kv;
};

/// Gathers the rows of one query's keys, tile by tile, by the value warps: eight lanes a row.
template <class Shape>
class Gather {
 public:
  using T = typename Shape::T;

  __device__ Gather(const ForwardParameters& parameters, std::int64_t t, int slots, int thread)
      : parameters_(parameters),
        indices_(parameters.indices + t * parameters.indices_stride),
        slots_(slots),
        row_(thread / kLanesPerRow),
        lane_(thread % kLanesPerRow) {
    load_index(0);
  }

  /// Copies the rows of a tile, whose indices were loaded one tile ago, and loads the next tile's
  /// indices. A tile past the last slot is an empty group of copies.
  __device__ void start(int tile, const Tiles<Shape>& tiles,
                        std::int32_t (&keys)[kMaxStages][Shape::kKeys]) {
    constexpr int kVector = 16 / sizeof(T);
    if (tile * Shape::kKeys < slots_ && (kAllRows || row_ < Shape::kKeys)) {
      const std::int32_t key = index_ < parameters_.keys ? index_ : -1;
      const T* const kv = static_cast<const T*>(parameters_.kv);
      const std::uint32_t to = tiles.rows_of(tile) + row_ * tiles.row_bytes;
      if (lane_ == 0) keys[tiles.stage_of(tile)][row_] = max(key, -1);
      if (parameters_.kv_aligned) {
        const T* const from = kv + max(key, 0) * parameters_.kv_stride;
#pragma unroll 4
        for (int d = lane_ * kVector; d < parameters_.qk_dim; d += kLanesPerRow * kVector) {
          copy_or_clear_16_bytes_async(to + d * static_cast<int>(sizeof(T)), from + d, key >= 0);
        }
      } else {
        copy_row(element_at<T>(to), key < 0 ? nullptr : kv + key * parameters_.kv_stride,
                 parameters_.qk_dim, false, lane_);
      }
    }
    commit_copies();
    load_index(tile + 1);
  }

 private:
  static constexpr int kRowsAtOnce = Shape::kValueThreads / kLanesPerRow;
  static constexpr bool kAllRows = kRowsAtOnce == Shape::kKeys;
  static_assert(kRowsAtOnce >= Shape::kKeys);

  /// Only issues the load; using the value here would stall.
  __device__ void load_index(int tile) {
    const std::int64_t slot = std::int64_t{tile} * Shape::kKeys + row_;
    index_ = -1;
    if (slot < slots_ && (kAllRows || row_ < Shape::kKeys)) index_ = indices_[slot];
  }

  const ForwardParameters& parameters_;
  const std::int32_t* indices_;
  int slots_;
  int row_;
  int lane_;
  std::int32_t index_;
};

}  // namespace winnow::cuda::sparse_attention::forward_general
