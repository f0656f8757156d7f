// SPDX-License-Identifier: Apache-2.0
// Packs rows of tensors into the matrices that matmul-inl.h multiplies, of floats or, from
// bf16, of pairs: gathered by key, in order, transposed, or two rows interleaved. Columns are
// padded with zeros to kColumnPadding. Included once per SIMD target.
#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <span>

#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include "cpu/elements-inl.h"
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

/// Makes elements of one row of numbers: converts it to fp32, or copies pairs of bf16, of which the
/// last one may hold a 0.
inline void load_row(DType dtype, const void* from, float* to, std::int64_t columns) {
  widen_row(dtype, from, to, columns);
}
inline void load_row(DType, const void* from, Bf16Pair* to, std::int64_t columns) {
  if (columns % 2 != 0) to[columns / 2] = {};
  std::memcpy(to, from, static_cast<std::size_t>(columns) * sizeof(BFloat16));
}

/// The same, padded with zeros.
template <class Element>
void load_padded(DType dtype, const void* from, Element* to, std::int64_t columns) {
  const std::int64_t elements = elements_of<Element>(columns);
  load_row(dtype, from, to, columns);
  std::fill(to + elements, to + padded_columns(elements), Element{});
}

/// to[j] = row keys[j] of `tensor` [keys, columns]
template <class Element>
void gather_rows(const Tensor& tensor, const std::int32_t* keys, std::int64_t count, Element* to,
                 std::int64_t stride) {
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
    load_padded(tensor.dtype, row_of(tensor, keys[j]), to + j * stride, columns);
  }
}

/// to[i] = row begin + i of `tensor` [rows, columns]
template <class Element>
void load_rows(const Tensor& tensor, std::int64_t begin, std::int64_t count, Element* to,
               std::int64_t stride) {
  for (std::int64_t i = 0; i < count; ++i) {
    load_padded(tensor.dtype, row_of(tensor, begin + i), to + i * stride, tensor.shape[1]);
  }
}

/// to[column * stride + i] = rows[i * row_stride + column] for i in [0, 4)
template <class Element>
void transpose_four(const Element* rows, std::int64_t row_stride, std::int64_t columns, Element* to,
                    std::int64_t stride) {
#if HWY_TARGET == HWY_SCALAR
  for (std::int64_t column = 0; column < columns; ++column) {
    for (std::int64_t i = 0; i < 4; ++i) to[column * stride + i] = rows[i * row_stride + column];
  }
#else
  const hn::FixedTag<std::uint32_t, 4> d;
  const hn::RepartitionToWide<decltype(d)> pairs;
  const auto* const from = reinterpret_cast<const std::uint32_t*>(rows);
  for (std::int64_t column = 0; column < columns; column += 4) {
    const auto a = hn::LoadU(d, from + column);
    const auto b = hn::LoadU(d, from + row_stride + column);
    const auto c = hn::LoadU(d, from + 2 * row_stride + column);
    const auto e = hn::LoadU(d, from + 3 * row_stride + column);
    const auto ab_low = hn::BitCast(pairs, hn::InterleaveLower(d, a, b));
    const auto ab_high = hn::BitCast(pairs, hn::InterleaveUpper(d, a, b));
    const auto ce_low = hn::BitCast(pairs, hn::InterleaveLower(d, c, e));
    const auto ce_high = hn::BitCast(pairs, hn::InterleaveUpper(d, c, e));
    auto* const four_columns = reinterpret_cast<std::uint32_t*>(to + column * stride);
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

/// to[column, i] = tensor[begin + i, column]. The elements of a row are a multiple of 4, and four
/// padded rows fit into `scratch`.
template <class Element>
void transpose_rows(const Tensor& tensor, std::int64_t begin, std::int64_t count, Element* to,
                    std::int64_t stride, Element* scratch) {
  const std::int64_t columns = tensor.shape[1];
  const std::int64_t elements = elements_of<Element>(columns);
  const std::int64_t scratch_stride = padded_stride(elements);
  for (std::int64_t i = 0; i < padded_columns(count); i += 4) {
    for (std::int64_t j = 0; j < 4; ++j) {
      Element* const row = scratch + j * scratch_stride;
      if (i + j < count) {
        load_row(tensor.dtype, row_of(tensor, begin + i + j), row, columns);
      } else {
        std::fill(row, row + elements, Element{});
      }
    }
    transpose_four(scratch, scratch_stride, elements, to + i, stride);
  }
}

/// to[column] = (first[column], second[column]), padded with zeros: two rows of bf16 as one of
/// pairs along the rows. An absent second row counts as zeros.
inline void interleave_rows(const void* first, const void* second, std::int64_t columns,
                            Bf16Pair* to) {
  const PairTag d;
  const hn::Rebind<std::uint16_t, PairTag> u16;
  const auto* const low = static_cast<const std::uint16_t*>(first);
  const auto* const high = static_cast<const std::uint16_t*>(second);
  std::int64_t i = 0;
  for (; i + kLanes <= columns; i += kLanes) {
    auto pair = hn::PromoteTo(d, hn::LoadU(u16, low + i));
    if (high != nullptr)
      pair = hn::Or(pair, hn::ShiftLeft<16>(hn::PromoteTo(d, hn::LoadU(u16, high + i))));
    hn::StoreU(pair, d, &to[i].bits);
  }
  for (; i < columns; ++i) {
    std::uint16_t numbers[2] = {};
    std::memcpy(&numbers[0], low + i, sizeof(numbers[0]));
    if (high != nullptr) std::memcpy(&numbers[1], high + i, sizeof(numbers[1]));
    to[i].bits = numbers[0] | static_cast<std::uint32_t>(numbers[1]) << 16;
  }
  std::fill(to + columns, to + padded_columns(columns), Bf16Pair{});
}

/// Rows begin to begin + count of `tensor` [rows, columns] as the depth of an operand: of floats
/// each is a row of `to`, of pairs two are.
inline void load_depth(const Tensor& tensor, std::int64_t begin, std::int64_t count, float* to,
                       std::int64_t stride) {
  load_rows(tensor, begin, count, to, stride);
}
inline void load_depth(const Tensor& tensor, std::int64_t begin, std::int64_t count, Bf16Pair* to,
                       std::int64_t stride) {
  for (std::int64_t i = 0; i < count; i += 2) {
    const void* const second = i + 1 < count ? row_of(tensor, begin + i + 1) : nullptr;
    interleave_rows(row_of(tensor, begin + i), second, tensor.shape[1], to + i / 2 * stride);
  }
}

/// Pairs along the rows of `count` packed rows of bf16, of which the first `columns` are taken.
inline void interleave_packed(const Bf16Pair* from, std::int64_t from_stride, std::int64_t count,
                              std::int64_t columns, Bf16Pair* to, std::int64_t stride) {
  for (std::int64_t i = 0; i < count; i += 2) {
    const Bf16Pair* const row = from + i * from_stride;
    interleave_rows(row, i + 1 < count ? row + from_stride : nullptr, columns, to + i / 2 * stride);
  }
}

/// Pairs of floats, rounded to bf16.
HWY_INLINE void store_pairs(FloatVector first, FloatVector second, Bf16Pair* to) {
  const FloatTag d;
  const auto high = hn::ShiftLeft<16>(narrow_bits(d, second, BFloat16{}));
  hn::StoreU(hn::Or(narrow_bits(d, first, BFloat16{}), high), PairTag(), &to->bits);
}

/// The magnitudes of bf16 whose bits are these.
inline float magnitude_of(std::uint32_t bits) { return std::bit_cast<float>(bits << 16); }

/// The least magnitude but 0 in `count` rows of pairs, which are padded with zeros: infinity if
/// there is none.
inline float least_magnitude(const Bf16Pair* rows, std::int64_t stride, std::int64_t count,
                             std::int64_t pairs) {
  constexpr std::uint16_t kInfinity = 0x7f80;
  const hn::ScalableTag<std::uint16_t> d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const auto magnitude = hn::Set(d, std::uint16_t{0x7fff});
  const auto one = hn::Set(d, std::uint16_t{1});
  // Less 1, since then 0 is the largest number.
  auto least = hn::Set(d, static_cast<std::uint16_t>(kInfinity - 1));
  for (std::int64_t i = 0; i < count; ++i) {
    const auto* const row = reinterpret_cast<const std::uint16_t*>(rows + i * stride);
    for (std::int64_t j = 0; j < 2 * pairs; j += lanes)
      least = hn::Min(least, hn::Sub(hn::And(hn::LoadU(d, row + j), magnitude), one));
  }
  return magnitude_of(hn::GetLane(hn::MinOfLanes(d, least)) + 1u);
}

/// The same of floats.
inline float least_magnitude(std::span<const float> values) {
  std::uint32_t least = 0x7f800000u - 1;
  for (const float value : values)
    least = std::min(least, (std::bit_cast<std::uint32_t>(value) & 0x7fffffffu) - 1);
  return std::bit_cast<float>(least + 1);
}

/// The largest magnitude in such rows. NaN exceeds infinity.
inline float largest_magnitude(const Bf16Pair* rows, std::int64_t stride, std::int64_t count,
                               std::int64_t pairs) {
  const hn::ScalableTag<std::uint16_t> d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const auto magnitude = hn::Set(d, std::uint16_t{0x7fff});
  auto largest = hn::Zero(d);
  for (std::int64_t i = 0; i < count; ++i) {
    const auto* const row = reinterpret_cast<const std::uint16_t*>(rows + i * stride);
    for (std::int64_t j = 0; j < 2 * pairs; j += lanes)
      largest = hn::Max(largest, hn::And(hn::LoadU(d, row + j), magnitude));
  }
  return magnitude_of(hn::GetLane(hn::MaxOfLanes(d, largest)));
}

/// The same of floats.
inline float largest_magnitude(std::span<const float> values) {
  std::uint32_t largest = 0;
  for (const float value : values)
    largest = std::max(largest, std::bit_cast<std::uint32_t>(value) & 0x7fffffffu);
  return std::bit_cast<float>(largest);
}

/// The largest magnitudes in kLanes columns of pairs.
inline FloatVector largest_of_columns(const Bf16Pair* rows, std::int64_t stride,
                                      std::int64_t count) {
  const PairTag d;
  const auto magnitude = hn::Set(d, 0x7fff0000u);
  auto largest = hn::Zero(d);
  for (std::int64_t i = 0; i < count; ++i) {
    const auto pair = load_elements(rows + i * stride);
    const auto first = hn::And(hn::ShiftLeft<16>(pair), magnitude);
    largest = hn::Max(largest, hn::Max(first, hn::And(pair, magnitude)));
  }
  return hn::BitCast(FloatTag(), largest);
}

/// Where no magnitude of two factors is below it but 0, their products and sums of these are 0 or
/// normal: multiply_add counts denormals as 0, and products of bf16 are multiples of 2^-126 then.
inline constexpr float kLeastMagnitude = 0x1p-56f;

/// The same of two factors that differ in magnitude, from the least of each but 0. The spacing of
/// bf16 goes by the power of two below a number, which may be just above half of it.
inline bool have_normal_products(float least, float least_of_other) {
  return std::min(least, 1.0f) * std::min(least_of_other, 1.0f) >=
         4 * kLeastMagnitude * kLeastMagnitude;
}

}  // namespace winnow::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
