// SPDX-License-Identifier: Apache-2.0
// The general forward kernel's value warps: out = P V. A warp has up to 32 heads and some groups
// of columns, in accumulators.
#pragma once

#include <cstdint>

#include "cuda/common/mma.cuh"
#include "cuda/sparse_attention/forward_general/gather.cuh"

namespace winnow::cuda::sparse_attention::forward_general {

template <class Shape>
class ValueWarp {
 public:
  using T = typename Shape::T;
  using Storage = typename Shape::Storage;

  /// `warp` is counted among the value warps.
  __device__ ValueWarp(const ForwardParameters& parameters, const Storage& shared,
                       const Tiles<Shape>& tiles, int warp, int lane)
      : parameters_(parameters), shared_(shared), tiles_(tiles), warp_(warp), lane_(lane) {}

  /// values += P V of a tile.
  __device__ void add(int tile) {
    rescale(tile % 2);
    const BlockOffset corner = rows_first(lane_);
    const std::uint32_t p_row =
        shared_address(&shared_.p[tile % 2][first_row() + corner.row][corner.column]);
    const std::uint32_t v_row = fragment_address(tiles_.rows_of(tile), tiles_.row_bytes, corner);
#pragma unroll
    for (int block = 0; block < Shape::kKeys / 16; ++block) {
      std::uint32_t p[kHeadBlocks][4];
#pragma unroll
      for (int m = 0; m < kHeadBlocks; ++m) {
        load_fragments_at(p[m], p_row + (m * 16 * kPStride + block * 16) * kSize);
      }
#pragma unroll
      for (int group = 0; group < Shape::kGroups; ++group) {
        if (column_of(group) >= parameters_.v_dim) break;
        const std::uint32_t v_group =
            v_row + block * 16 * tiles_.row_bytes + column_of(group) * kSize;
#pragma unroll
        for (int i = 0; i < Shape::kGroupPairs; ++i) {
          const int n = (group * Shape::kGroupPairs + i) * 2;
          std::uint32_t v[4];
          load_transposed_at(v, v_group + i * 16 * kSize);
#pragma unroll
          for (int m = 0; m < kHeadBlocks; ++m) {
            multiply_add<T>(values_[m][n], p[m], v[0], v[1]);
            multiply_add<T>(values_[m][n + 1], p[m], v[2], v[3]);
          }
        }
      }
    }
  }

  __device__ void store(std::int64_t t, int first_head) const {
    T* const out = static_cast<T*>(parameters_.out) + t * parameters_.out_token_stride;
#pragma unroll
    for (int m = 0; m < kHeadBlocks; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = first_row() + m * 16 + r * 8 + lane_ / 4;
        const int h = first_head + row;
        if (h >= parameters_.heads) continue;
        const float normalizer = shared_.normalizer[row];
        T* const out_row = out + h * parameters_.out_head_stride + lane_ % 4 * 2;
#pragma unroll
        for (int n = 0; n < Shape::kPairs * 2; ++n) {
          const int column =
              column_of(n / 2 / Shape::kGroupPairs) + n % (Shape::kGroupPairs * 2) * 8;
          if (column < parameters_.v_dim) {
            store_pair(out_row + column, values_[m][n][r * 2] * normalizer,
                       values_[m][n][r * 2 + 1] * normalizer, parameters_.out_aligned);
          }
        }
      }
    }
  }

 private:
  static constexpr int kHeadBlocks = Shape::kValueHeads / 16;
  static constexpr int kSize = sizeof(T);
  static constexpr int kPStride = Shape::kKeys + kRowPadding;

  __device__ int column_of(int group) const {
    return (warp_ % Shape::kColumnWarps + group * Shape::kColumnWarps) * Shape::kGroupColumns;
  }
  /// The first of this warp's heads among the block's.
  __device__ int first_row() const { return warp_ / Shape::kColumnWarps * Shape::kValueHeads; }

  /// Measures the values of the rows whose base has moved from the new one.
  __device__ void rescale(int buffer) {
#pragma unroll
    for (int m = 0; m < kHeadBlocks; ++m) {
      if (shared_.moved[buffer][first_row() / 16 + m] == 0) continue;
      float factors[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        factors[r] = shared_.factor[buffer][first_row() + m * 16 + r * 8 + lane_ / 4];
      }
#pragma unroll
      for (int n = 0; n < Shape::kPairs * 2; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) values_[m][n][e] *= factors[e / 2];
      }
    }
  }

  const ForwardParameters& parameters_;
  const Storage& shared_;
  const Tiles<Shape>& tiles_;
  int warp_, lane_;
  float values_[kHeadBlocks][Shape::kPairs * 2][4] = {};  // the accumulators of out
};

}  // namespace winnow::cuda::sparse_attention::forward_general
