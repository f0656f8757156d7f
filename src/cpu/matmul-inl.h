// SPDX-License-Identifier: Apache-2.0
// Small dense matrix products in fp32: a register tile of C = A B, and loops over such tiles.
//
// B and C are row-major, and a vector is a piece of such a row; elements of A are broadcast. So A
// may have either layout, and B needs no packing once its rows are padded to whole vectors. Every
// element of C is one chain of multiply-adds over the depth (the K of a GEMM), in order: its bits
// do not depend on the tile in which it is computed.
//
// A tile is kTileRows x kTileVectors vectors. All tiles of a column of C read the same panel of B,
// depth x kTileVectors vectors, which stays in L1 if the caller limits the depth to kPanelDepth:
// half of an L1 of 32 KiB.
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

// The accumulators, a row of B and one broadcast element fill the 32, or 16, vector registers.
#if HWY_TARGET <= HWY_AVX3 || HWY_ARCH_ARM_A64 || HWY_ARCH_PPC
inline constexpr int kTileRows = 12;
#else
inline constexpr int kTileRows = 6;
#endif
inline constexpr int kTileVectors = 2;
inline constexpr std::int64_t kPanelColumns = kTileVectors * kLanes;
inline constexpr std::int64_t kPanelDepth = 16384 / (kPanelColumns * sizeof(float));

/// The layout of A: element (row, k) is at data[row * stride + k] (K-major), or at
/// data[k * stride + row] (MN-major).
enum class Layout { k_major, mn_major };

/// The operand A of a product.
template <Layout kLayout>
struct OperandA {
  const float* data;
  std::int64_t stride;

  OperandA from_row(std::int64_t row) const {
    return {data + (kLayout == Layout::k_major ? row * stride : row), stride};
  }
  OperandA from_depth(std::int64_t k) const {
    return {data + (kLayout == Layout::k_major ? k : k * stride), stride};
  }
};
using KMajor = OperandA<Layout::k_major>;
using MnMajor = OperandA<Layout::mn_major>;

/// Computes one register tile and calls epilogue(row, v, accumulator) for every vector of it, row
/// after row.
template <int kRows, int kVectors, Layout kLayout, class Epilogue>
HWY_NOINLINE void multiply_tile(OperandA<kLayout> a, const float* HWY_RESTRICT b,
                                std::int64_t b_stride, std::int64_t depth,
                                const Epilogue& epilogue) {
  const FloatTag d;
  FloatVector accumulator[kRows][kVectors];
  HWY_UNROLL(12)  // fully, since accumulators with a run-time index would live in memory
  for (int row = 0; row < kRows; ++row) {
    for (int v = 0; v < kVectors; ++v) accumulator[row][v] = hn::Zero(d);
  }
  // Four rows share a pointer, so that all addresses of A fit into general-purpose registers.
  constexpr int kPointers = (kRows + 3) / 4;
  const std::int64_t row_step = kLayout == Layout::k_major ? a.stride : 1;
  const std::int64_t depth_step = kLayout == Layout::k_major ? 1 : a.stride;
  const float* four_rows[kPointers];
  for (int i = 0; i < kPointers; ++i) four_rows[i] = a.data + 4 * i * row_step;

  for (std::int64_t k = 0; k < depth; ++k) {
    FloatVector b_row[kVectors];
    for (int v = 0; v < kVectors; ++v) b_row[v] = hn::LoadU(d, b + v * kLanes);
    for (int row = 0; row < kRows; ++row) {
      const auto element = hn::Set(d, four_rows[row / 4][row % 4 * row_step]);
      for (int v = 0; v < kVectors; ++v)
        accumulator[row][v] = hn::MulAdd(element, b_row[v], accumulator[row][v]);
    }
    b += b_stride;
    for (int i = 0; i < kPointers; ++i) four_rows[i] += depth_step;
  }
  HWY_UNROLL(12)
  for (int row = 0; row < kRows; ++row) {
    for (int v = 0; v < kVectors; ++v) epilogue(row, v, accumulator[row][v]);
  }
}

template <Layout kLayout, class Epilogue>
using TileFunction = void (*)(OperandA<kLayout>, const float*, std::int64_t, std::int64_t,
                              const Epilogue&);

template <int kVectors, Layout kLayout, class Epilogue, int... kRowsMinusOne>
constexpr std::array<TileFunction<kLayout, Epilogue>, kTileRows> make_tiles(
    std::integer_sequence<int, kRowsMinusOne...>) {
  return {&multiply_tile<kRowsMinusOne + 1, kVectors, kLayout, Epilogue>...};
}

/// kTiles<vectors>[rows - 1] is multiply_tile for `rows` rows.
template <int kVectors, Layout kLayout, class Epilogue>
inline constexpr auto kTiles =
    make_tiles<kVectors, kLayout, Epilogue>(std::make_integer_sequence<int, kTileRows>());

/// Computes C[rows, columns] = A[rows, depth] B[depth, columns] and hands it to `epilogue` vector
/// by vector. B is read up to whole vectors of columns. epilogue.at(row, column) returns the
/// epilogue of the tile that begins there.
template <Layout kLayout, class Epilogue>
void multiply(OperandA<kLayout> a, std::int64_t rows, const float* b, std::int64_t b_stride,
              std::int64_t columns, std::int64_t depth, const Epilogue& epilogue) {
  const std::int64_t tiles = ceil_div(rows, kTileRows);
  for (std::int64_t column = 0; column < columns; column += kPanelColumns) {
    const auto& tile_of_rows = columns - column > kLanes ? kTiles<kTileVectors, kLayout, Epilogue>
                                                         : kTiles<1, kLayout, Epilogue>;
    // Tiles of nearly equal size: a last tile of few rows would not hide the latency of the FMAs.
    std::int64_t row = 0;
    for (std::int64_t i = 0; i < tiles; ++i) {
      const std::int64_t next = rows * (i + 1) / tiles;
      tile_of_rows[static_cast<std::size_t>(next - row - 1)](a.from_row(row), b + column, b_stride,
                                                             depth, epilogue.at(row, column));
      row = next;
    }
  }
}

/// Epilogue: C = A B, where the rows of C are padded like those of B.
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

/// Epilogue: C += A B, padded in the same way.
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

/// C = A B, or C += A B if `accumulate`, blocked over the depth so that the panels of B fit in L1.
template <Layout kLayout>
void multiply_blocked(OperandA<kLayout> a, std::int64_t rows, const float* b, std::int64_t b_stride,
                      std::int64_t columns, std::int64_t depth, float* c, std::int64_t c_stride,
                      bool accumulate = false) {
  const std::int64_t blocks = ceil_div(depth, kPanelDepth);
  std::int64_t k = 0;
  for (std::int64_t i = 0; i < blocks; ++i) {
    const std::int64_t next = depth * (i + 1) / blocks;
    const auto multiply_block = [&](const auto& epilogue) HWY_ATTR {
      multiply(a.from_depth(k), rows, b + k * b_stride, b_stride, columns, next - k, epilogue);
    };
    if (i == 0 && !accumulate) {
      multiply_block(StoreTo{c, c_stride});
    } else {
      multiply_block(AddTo{c, c_stride});
    }
    k = next;
  }
}

}  // namespace winnow::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
