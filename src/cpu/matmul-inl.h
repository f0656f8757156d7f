// SPDX-License-Identifier: Apache-2.0
// Small dense matrix products in fp32: a register tile of C = A B, and loops of such tiles.
//
// B and C lie row by row, and a vector is a piece of such a row; elements of A are broadcast. So A
// may lie either way round and B never needs packing, if it has been padded to whole vectors.
// Every element of C is one chain of multiply-adds over the depth, in order: its bits do not depend
// on the tile in which it was computed.
//
// A tile is kTileRows x kTileVectors; what stays in the first cache is a panel of B, depth x
// kTileVectors vectors, which all tiles of that panel go through. The caller keeps it there by the
// depth: kPanelDepth rows are half of a first cache of 32 KiB.
#include <array>
#include <cstdint>
#include <utility>

#include <hwy/highway.h>

#include "cpu/simd.h"

#if defined(WINNOW_CPU_MATMUL_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef WINNOW_CPU_MATMUL_INL_H_
#undef WINNOW_CPU_MATMUL_INL_H_
#else
#define WINNOW_CPU_MATMUL_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace winnow::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using FloatTag = hn::ScalableTag<float>;
using FloatVector = hn::Vec<FloatTag>;
inline constexpr std::int64_t kLanes = HWY_LANES(float);

// Accumulators, a row of B and one broadcast element fill the registers: 32 of them, or 16.
#if HWY_TARGET <= HWY_AVX3 || HWY_ARCH_ARM_A64 || HWY_ARCH_PPC
inline constexpr int kTileRows = 12;
#else
inline constexpr int kTileRows = 6;
#endif
inline constexpr int kTileVectors = 2;
inline constexpr std::int64_t kPanelColumns = kTileVectors * kLanes;
inline constexpr std::int64_t kPanelDepth = 16384 / (kPanelColumns * sizeof(float));

/// How A lies: element (row, k) at data[row * stride + k], or at data[k * stride + row].
enum class Order { row_by_row, transposed };

template <Order kOrder>
struct Left {
  const float* data;
  std::int64_t stride;

  Left from_row(std::int64_t row) const {
    return {data + (kOrder == Order::row_by_row ? row * stride : row), stride};
  }
  Left from_depth(std::int64_t k) const {
    return {data + (kOrder == Order::row_by_row ? k : k * stride), stride};
  }
};
using RowByRow = Left<Order::row_by_row>;
using Transposed = Left<Order::transposed>;

/// Calls finish(row, vector, sum) for every vector of the tile, the vectors of row 0 first.
template <int kRows, int kVectors, Order kOrder, class Finish>
HWY_NOINLINE void multiply_tile(Left<kOrder> a, const float* HWY_RESTRICT b, std::int64_t b_stride,
                                std::int64_t depth, const Finish& finish) {
  const FloatTag d;
  FloatVector sum[kRows][kVectors];
  HWY_UNROLL(12)  // all of them: what is indexed at run time would lie in memory
  for (int row = 0; row < kRows; ++row) {
    for (int v = 0; v < kVectors; ++v) sum[row][v] = hn::Zero(d);
  }
  // Four rows share a pointer, so that all addresses of A fit into the registers.
  constexpr int kPointers = (kRows + 3) / 4;
  const std::int64_t row_step = kOrder == Order::row_by_row ? a.stride : 1;
  const std::int64_t depth_step = kOrder == Order::row_by_row ? 1 : a.stride;
  const float* four_rows[kPointers];
  for (int i = 0; i < kPointers; ++i) four_rows[i] = a.data + 4 * i * row_step;

  for (std::int64_t k = 0; k < depth; ++k) {
    FloatVector b_row[kVectors];
    for (int v = 0; v < kVectors; ++v) b_row[v] = hn::LoadU(d, b + v * kLanes);
    for (int row = 0; row < kRows; ++row) {
      const auto element = hn::Set(d, four_rows[row / 4][row % 4 * row_step]);
      for (int v = 0; v < kVectors; ++v) sum[row][v] = hn::MulAdd(element, b_row[v], sum[row][v]);
    }
    b += b_stride;
    for (int i = 0; i < kPointers; ++i) four_rows[i] += depth_step;
  }
  HWY_UNROLL(12)
  for (int row = 0; row < kRows; ++row) {
    for (int v = 0; v < kVectors; ++v) finish(row, v, sum[row][v]);
  }
}

template <Order kOrder, class Finish>
using Tile = void (*)(Left<kOrder>, const float*, std::int64_t, std::int64_t, const Finish&);

template <int kVectors, Order kOrder, class Finish, int... kFewer>
constexpr std::array<Tile<kOrder, Finish>, kTileRows> make_tiles(
    std::integer_sequence<int, kFewer...>) {
  return {&multiply_tile<kFewer + 1, kVectors, kOrder, Finish>...};
}

/// kTiles<vectors>[rows - 1]
template <int kVectors, Order kOrder, class Finish>
inline constexpr auto kTiles =
    make_tiles<kVectors, kOrder, Finish>(std::make_integer_sequence<int, kTileRows>());

/// C[rows, columns] = A[rows, depth] B[depth, columns], handed to `finish` vector by vector; B must
/// be readable, and is used, up to whole vectors of columns. finish.at(row, column) is the `finish`
/// of the tile that begins there.
template <Order kOrder, class Finish>
void multiply(Left<kOrder> a, std::int64_t rows, const float* b, std::int64_t b_stride,
              std::int64_t columns, std::int64_t depth, const Finish& finish) {
  const std::int64_t tiles = ceil_div(rows, kTileRows);
  for (std::int64_t column = 0; column < columns; column += kPanelColumns) {
    const auto& tile_of_rows = columns - column > kLanes ? kTiles<kTileVectors, kOrder, Finish>
                                                         : kTiles<1, kOrder, Finish>;
    // Tiles of nearly equal size: a last one of few rows could not hide the latency of the sums.
    std::int64_t row = 0;
    for (std::int64_t i = 0; i < tiles; ++i) {
      const std::int64_t next = rows * (i + 1) / tiles;
      tile_of_rows[static_cast<std::size_t>(next - row - 1)](a.from_row(row), b + column, b_stride,
                                                             depth, finish.at(row, column));
      row = next;
    }
  }
}

/// C = A B, to memory padded as B.
struct StoreTo {
  float* c;
  std::int64_t stride;

  StoreTo at(std::int64_t row, std::int64_t column) const {
    return {c + row * stride + column, stride};
  }
  HWY_INLINE void operator()(int row, int v, FloatVector sum) const {
    hn::StoreU(sum, FloatTag(), c + row * stride + v * kLanes);
  }
};

/// C += A B
struct AddTo {
  float* c;
  std::int64_t stride;

  AddTo at(std::int64_t row, std::int64_t column) const {
    return {c + row * stride + column, stride};
  }
  HWY_INLINE void operator()(int row, int v, FloatVector sum) const {
    const FloatTag d;
    float* const to = c + row * stride + v * kLanes;
    hn::StoreU(hn::Add(hn::LoadU(d, to), sum), d, to);
  }
};

/// C = A B, or C += A B, in pieces of the depth whose panels of B fit into the first cache.
template <Order kOrder>
void multiply_deep(Left<kOrder> a, std::int64_t rows, const float* b, std::int64_t b_stride,
                   std::int64_t columns, std::int64_t depth, float* c, std::int64_t c_stride,
                   bool is_added = false) {
  const std::int64_t pieces = ceil_div(depth, kPanelDepth);
  std::int64_t k = 0;
  for (std::int64_t i = 0; i < pieces; ++i) {
    const std::int64_t next = depth * (i + 1) / pieces;
    const auto piece = [&](const auto& finish) HWY_ATTR {
      multiply(a.from_depth(k), rows, b + k * b_stride, b_stride, columns, next - k, finish);
    };
    if (i == 0 && !is_added) {
      piece(StoreTo{c, c_stride});
    } else {
      piece(AddTo{c, c_stride});
    }
    k = next;
  }
}

}  // namespace winnow::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
