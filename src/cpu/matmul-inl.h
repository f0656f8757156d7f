// SPDX-License-Identifier: Apache-2.0
// Small dense matrix products with fp32 sums: a register tile of C = A B, and loops over such
// tiles.
//
// The elements of A and B are floats, or pairs of bf16 (elements-inl.h); those of C are fp32.
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

#include "cpu/elements-inl.h"
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

// The accumulators, a row of B and one broadcast element fill the 32, or 16, vector registers.
#if HWY_TARGET <= HWY_AVX3 || HWY_ARCH_ARM_A64 || HWY_ARCH_PPC
inline constexpr int kTileRows = 12;
#else
inline constexpr int kTileRows = 6;
#endif
inline constexpr int kTileVectors = 2;
inline constexpr std::int64_t kPanelColumns = kTileVectors * kLanes;
inline constexpr std::int64_t kPanelDepth = 16384 / (kPanelColumns * sizeof(float));

/// The operand A of a product, K-major: element (row, k) is at data[row * stride + k].
template <class Element>
struct KMajor {
  const Element* data;
  std::int64_t stride;

  std::int64_t row_step() const { return stride; }
  std::int64_t depth_step() const { return 1; }
  KMajor from(std::int64_t row, std::int64_t k) const { return {data + row * stride + k, stride}; }
};
template <class Element>
KMajor(const Element*, std::int64_t) -> KMajor<Element>;

/// The operand A, MN-major: element (row, k) is at data[k * stride + row].
template <class Element>
struct MnMajor {
  const Element* data;
  std::int64_t stride;

  std::int64_t row_step() const { return 1; }
  std::int64_t depth_step() const { return stride; }
  MnMajor from(std::int64_t row, std::int64_t k) const { return {data + k * stride + row, stride}; }
};
template <class Element>
MnMajor(const Element*, std::int64_t) -> MnMajor<Element>;

/// Computes one register tile and calls epilogue(row, v, accumulator) for every vector of it, row
/// after row.
template <int kRows, int kVectors, template <class> class OperandA, class Element, class Epilogue>
HWY_NOINLINE void multiply_tile(OperandA<Element> a, const Element* HWY_RESTRICT b,
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
  const Element* four_rows[kPointers];
  for (int i = 0; i < kPointers; ++i) four_rows[i] = a.data + 4 * i * a.row_step();

  for (std::int64_t k = 0; k < depth; ++k) {
    ElementVector<Element> b_row[kVectors];
    for (int v = 0; v < kVectors; ++v) b_row[v] = load_elements(b + v * kLanes);
    for (int row = 0; row < kRows; ++row) {
      const auto element = broadcast(four_rows[row / 4][row % 4 * a.row_step()]);
      for (int v = 0; v < kVectors; ++v)
        accumulator[row][v] = multiply_add(element, b_row[v], accumulator[row][v]);
    }
    b += b_stride;
    for (int i = 0; i < kPointers; ++i) four_rows[i] += a.depth_step();
  }
  HWY_UNROLL(12)
  for (int row = 0; row < kRows; ++row) {
    for (int v = 0; v < kVectors; ++v) epilogue(row, v, accumulator[row][v]);
  }
}

template <class A, class Element, class Epilogue>
using TileFunction = void (*)(A, const Element*, std::int64_t, std::int64_t, const Epilogue&);

template <int kVectors, template <class> class OperandA, class Element, class Epilogue,
          int... kRowsMinusOne>
constexpr std::array<TileFunction<OperandA<Element>, Element, Epilogue>, kTileRows> make_tiles(
    std::integer_sequence<int, kRowsMinusOne...>) {
  return {&multiply_tile<kRowsMinusOne + 1, kVectors, OperandA, Element, Epilogue>...};
}

/// kTiles<vectors>[rows - 1] is multiply_tile for `rows` rows.
template <int kVectors, template <class> class OperandA, class Element, class Epilogue>
inline constexpr auto kTiles =
    make_tiles<kVectors, OperandA, Element, Epilogue>(std::make_integer_sequence<int, kTileRows>());

/// Computes C[rows, columns] = A[rows, depth] B[depth, columns] and hands it to `epilogue` vector
/// by vector. B is read up to whole vectors of columns. epilogue.at(row, column) returns the
/// epilogue of the tile that begins there.
template <template <class> class OperandA, class Element, class Epilogue>
void multiply(OperandA<Element> a, std::int64_t rows, const Element* b, std::int64_t b_stride,
              std::int64_t columns, std::int64_t depth, const Epilogue& epilogue) {
  const std::int64_t tiles = ceil_div(rows, kTileRows);
  for (std::int64_t column = 0; column < columns; column += kPanelColumns) {
    const auto& tile_of_rows = columns - column > kLanes
                                   ? kTiles<kTileVectors, OperandA, Element, Epilogue>
                                   : kTiles<1, OperandA, Element, Epilogue>;
    // Tiles of nearly equal size: a last tile of few rows would not hide the latency of the FMAs.
    std::int64_t row = 0;
    for (std::int64_t i = 0; i < tiles; ++i) {
      const std::int64_t next = rows * (i + 1) / tiles;
      tile_of_rows[static_cast<std::size_t>(next - row - 1)](a.from(row, 0), b + column, b_stride,
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

/// C = A B, or C += A B if `accumulate`, in blocks of at most `max_depth`, by default those whose
/// panels of B fit in L1.
template <template <class> class OperandA, class Element>
void multiply_blocked(OperandA<Element> a, std::int64_t rows, const Element* b,
                      std::int64_t b_stride, std::int64_t columns, std::int64_t depth, float* c,
                      std::int64_t c_stride, bool accumulate = false,
                      std::int64_t max_depth = kPanelDepth) {
  const std::int64_t blocks = ceil_div(depth, max_depth);
  std::int64_t k = 0;
  for (std::int64_t i = 0; i < blocks; ++i) {
    const std::int64_t next = depth * (i + 1) / blocks;
    const auto multiply_block = [&](const auto& epilogue) HWY_ATTR {
      multiply(a.from(0, k), rows, b + k * b_stride, b_stride, columns, next - k, epilogue);
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
