// SPDX-License-Identifier: Apache-2.0
// Packs rows of tensors into the fp32 matrices that matmul-inl.h multiplies: gathered by key, in
// order, or transposed. Columns are padded with zeros to kColumnPadding. Included once per SIMD
// target.
#include <algorithm>
#include <cstdint>

#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include "cpu/simd.h"
#include "cpu/widen-inl.h"
#include "winnow/tensor.h"

#if defined(WINNOW_CPU_PACK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef WINNOW_CPU_PACK_INL_H_
#undef WINNOW_CPU_PACK_INL_H_
#else
#define WINNOW_CPU_PACK_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace winnow::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

/// Converts one row to fp32 and pads it with zeros.
inline void widen_padded(DType dtype, const void* from, float* to, std::int64_t columns) {
  widen_row(dtype, from, to, columns);
  std::fill(to + columns, to + padded_columns(columns), 0.0f);
}

/// to[j] = row keys[j] of `tensor` [keys, columns]
inline void gather_rows(const Tensor& tensor, const std::int32_t* keys, std::int64_t count,
                        float* to, std::int64_t stride) {
  // Prefetch far enough ahead to hide the latency of memory, but not so far as to evict L1.
  constexpr std::int64_t kRowsAhead = 3;
  constexpr std::int64_t kCacheLine = 64;
  const std::int64_t columns = tensor.shape[1];
  const std::int64_t row_bytes = columns * element_bytes(tensor.dtype);
  const auto prefetch = [&](std::int64_t j) {
    if (j >= count) return;
    const auto* const row = static_cast<const char*>(row_of(tensor, keys[j]));
    for (std::int64_t i = 0; i < row_bytes; i += kCacheLine) hwy::Prefetch(row + i);
  };
  for (std::int64_t j = 0; j < kRowsAhead; ++j) prefetch(j);
  for (std::int64_t j = 0; j < count; ++j) {
    prefetch(j + kRowsAhead);
    widen_padded(tensor.dtype, row_of(tensor, keys[j]), to + j * stride, columns);
  }
}

/// to[i] = row begin + i of `tensor` [rows, columns]
inline void widen_rows(const Tensor& tensor, std::int64_t begin, std::int64_t count, float* to,
                       std::int64_t stride) {
  for (std::int64_t i = 0; i < count; ++i) {
    widen_padded(tensor.dtype, row_of(tensor, begin + i), to + i * stride, tensor.shape[1]);
  }
}

/// to[column * stride + i] = rows[i * row_stride + column] for i in [0, 4)
inline void transpose_four(const float* rows, std::int64_t row_stride, std::int64_t columns,
                           float* to, std::int64_t stride) {
#if HWY_TARGET == HWY_SCALAR
  for (std::int64_t column = 0; column < columns; ++column) {
    for (std::int64_t i = 0; i < 4; ++i) to[column * stride + i] = rows[i * row_stride + column];
  }
#else
  const hn::FixedTag<float, 4> d;
  const hn::RepartitionToWide<decltype(d)> pairs;
  for (std::int64_t column = 0; column < columns; column += 4) {
    const auto a = hn::LoadU(d, rows + column);
    const auto b = hn::LoadU(d, rows + row_stride + column);
    const auto c = hn::LoadU(d, rows + 2 * row_stride + column);
    const auto e = hn::LoadU(d, rows + 3 * row_stride + column);
    const auto ab_low = hn::BitCast(pairs, hn::InterleaveLower(d, a, b));
    const auto ab_high = hn::BitCast(pairs, hn::InterleaveUpper(d, a, b));
    const auto ce_low = hn::BitCast(pairs, hn::InterleaveLower(d, c, e));
    const auto ce_high = hn::BitCast(pairs, hn::InterleaveUpper(d, c, e));
    float* const four_columns = to + column * stride;
    const auto store = [&](auto v, std::int64_t i) HWY_ATTR {
      hn::StoreU(hn::BitCast(d, v), d, four_columns + i * stride);
    };
    store(hn::InterleaveLower(pairs, ab_low, ce_low), 0);
    store(hn::InterleaveUpper(pairs, ab_low, ce_low), 1);
    store(hn::InterleaveLower(pairs, ab_high, ce_high), 2);
    store(hn::InterleaveUpper(pairs, ab_high, ce_high), 3);
  }
#endif
}

/// Number of floats of scratch that transpose_rows needs.
inline constexpr std::int64_t transpose_scratch(std::int64_t columns) {
  return 4 * padded_stride(columns);
}

/// to[column, i] = tensor[begin + i, column]. The number of columns is a multiple of 4.
inline void transpose_rows(const Tensor& tensor, std::int64_t begin, std::int64_t count, float* to,
                           std::int64_t stride, float* scratch) {
  const std::int64_t columns = tensor.shape[1];
  const std::int64_t scratch_stride = padded_stride(columns);
  for (std::int64_t i = 0; i < padded_columns(count); i += 4) {
    for (std::int64_t j = 0; j < 4; ++j) {
      float* const row = scratch + j * scratch_stride;
      if (i + j < count) {
        widen_row(tensor.dtype, row_of(tensor, begin + i + j), row, columns);
      } else {
        std::fill(row, row + columns, 0.0f);
      }
    }
    transpose_four(scratch, scratch_stride, columns, to + i, stride);
  }
}

}  // namespace winnow::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
