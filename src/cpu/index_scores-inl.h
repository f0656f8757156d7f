// SPDX-License-Identifier: Apache-2.0
// The indexer's scores of a panel of keys. Included once per SIMD target.
//
// A panel holds kPanelColumns keys side by side, so that a vector holds one channel of many keys
// and relu, weight and the sum over heads need no operation across lanes. Every lane sums in the
// same order: channels first, then heads. So the bits of a score do not depend on the position of
// the key in its panel, and selection and replay return the same ones.
#include <algorithm>
#include <array>
#include <cstdint>

#include <hwy/highway.h>

#include "core/numerics.h"
#include "cpu/matmul-inl.h"
#include "cpu/pack-inl.h"
#include "cpu/simd.h"
#include "cpu/widen-inl.h"
#include "winnow/tensor.h"

#if defined(WINNOW_CPU_INDEX_SCORES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef WINNOW_CPU_INDEX_SCORES_INL_H_
#undef WINNOW_CPU_INDEX_SCORES_INL_H_
#else
#define WINNOW_CPU_INDEX_SCORES_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace winnow::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

inline void widen_float8_row(const void* source, float* to, std::int64_t count) {
  const FloatTag d;
  const hn::RebindToUnsigned<FloatTag> u32;
  const hn::Rebind<std::uint8_t, FloatTag> u8;
  const auto* const from = static_cast<const std::uint8_t*>(source);
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const auto bits = hn::PromoteTo(u32, hn::LoadU(u8, from + i));
    const auto magnitude = hn::And(bits, hn::Set(u32, 0x7fu));
    // Multiplying by 2^120 changes the exponent bias from 7 to 127 and is exact for denormals too.
    const auto value = hn::Mul(hn::BitCast(d, hn::ShiftLeft<20>(magnitude)), hn::Set(d, 0x1p120f));
    const auto sign = hn::ShiftLeft<24>(hn::And(bits, hn::Set(u32, 0x80u)));
    const auto number = hn::Or(hn::BitCast(u32, value), sign);
    const auto is_nan = hn::Eq(magnitude, hn::Set(u32, 0x7fu));
    hn::StoreU(hn::BitCast(d, hn::IfThenElse(is_nan, hn::Set(u32, 0x7fc00000u), number)), d,
               to + i);
  }
  for (; i < count; ++i) to[i] = to_float(Float8E4M3{from[i]});
}

/// Converts a row of any type that index_topk accepts to fp32.
inline void widen_index_row(DType dtype, const void* from, float* to, std::int64_t count) {
  if (dtype == DType::f8_e4m3) return widen_float8_row(from, to, count);
  widen_row(dtype, from, to, count);
}

/// Makes padded pairs of a row of bf16 or fp8. `scratch` has room for it in fp32.
inline void load_index_pairs(DType dtype, const void* from, Bf16Pair* to, std::int64_t count,
                             float* scratch) {
  if (dtype != DType::f8_e4m3) return load_padded(dtype, from, to, count);
  widen_float8_row(from, scratch, count);
  narrow_row(scratch, 1, reinterpret_cast<BFloat16*>(to), count);
  const std::int64_t pairs = elements_of<Bf16Pair>(count);
  std::fill(to + pairs, to + padded_columns(pairs), Bf16Pair{});
}

/// The scale of key s.
inline float scale_of(const Tensor& k_scale, std::int64_t s) {
  return static_cast<const float*>(k_scale.data)[s * k_scale.stride[0]];
}

/// Converts key s to fp32 and multiplies it by its scale, if there is one.
inline void widen_key(const Tensor& k, const Tensor& k_scale, std::int64_t s, float* to) {
  widen_index_row(k.dtype, row_of(k, s), to, k.shape[1]);
  if (!k_scale) return;
  const float scale = scale_of(k_scale, s);
  for (std::int64_t d = 0; d < k.shape[1]; ++d) to[d] *= scale;
}

/// Transposes kPanelColumns rows of `from` to the panel `to` [depth, kPanelColumns]. depth is a
/// multiple of 4.
template <class Element>
void transpose_to_panel(const Element* HWY_RESTRICT from, std::int64_t stride, std::int64_t depth,
                        Element* HWY_RESTRICT to) {
#if HWY_TARGET == HWY_SCALAR
  for (std::int64_t d = 0; d < depth; ++d) {
    for (std::int64_t i = 0; i < kPanelColumns; ++i)
      to[d * kPanelColumns + i] = from[i * stride + d];
  }
#else
  for (std::int64_t i = 0; i < kPanelColumns; i += 4)
    transpose_four(from + i * stride, stride, depth, to + i, kPanelColumns);
#endif
}

/// max(a, 0), but NaN stays NaN.
HWY_INLINE FloatVector relu(FloatVector a) {
  return hn::IfThenZeroElse(hn::Lt(a, hn::Zero(FloatTag())), a);
}

/// Epilogue: scores[key] += weights[h] * relu(a[h, key]), one head after another.
struct AddScores {
  const float* weights;
  float* scores;

  AddScores at(std::int64_t row, std::int64_t column) const {
    return {weights + row, scores + column};
  }
  HWY_INLINE void operator()(int row, int v, FloatVector a) const {
    const FloatTag d;
    float* const to = scores + v * kLanes;
    hn::StoreU(hn::MulAdd(hn::Set(d, weights[row]), relu(a), hn::LoadU(d, to)), d, to);
  }
};

// A score may be off by 1e-5 = 167 * 2^-24 of the sum of its terms' magnitudes, and each addition
// in a chain may be off by 2^-24 of it. So chains are short, in numbers and not in elements:

/// Longer dot products are computed in blocks.
inline constexpr std::int64_t kMaxUnblockedDim = 128;
/// Numbers in a block of a dot product; there is an addition for each block as well.
inline constexpr std::int64_t kBlockDim = 64;
/// Heads whose parts of a score are added in fp32; sums of more are added in double.
inline constexpr std::int64_t kBlockHeads = 36;

/// Elements that hold so many numbers.
template <class Element>
inline constexpr std::int64_t kMaxUnblockedDepth = kMaxUnblockedDim / kElementDepth<Element>;
template <class Element>
inline constexpr std::int64_t kBlockDepth = kBlockDim / kElementDepth<Element>;

/// The part of the scores that comes from up to kBlockHeads heads.
template <class Element>
void score_heads(KMajor<Element> queries, const float* weights, std::int64_t heads,
                 std::int64_t depth, const Element* panel, float* products, float* scores) {
  const FloatTag d;
  for (std::int64_t i = 0; i < kPanelColumns; i += kLanes) hn::StoreU(hn::Zero(d), d, scores + i);
  const AddScores add{weights, scores};
  if (depth <= kMaxUnblockedDepth<Element>) {
    multiply(queries, heads, panel, kPanelColumns, kPanelColumns, depth, add);
    return;
  }
  multiply_blocked(queries, heads, panel, kPanelColumns, kPanelColumns, depth, products,
                   kPanelColumns, false, kBlockDepth<Element>);
  for (std::int64_t h = 0; h < heads; ++h) {
    const AddScores add_head = add.at(h, 0);
    for (int v = 0; v < kTileVectors; ++v)
      add_head(0, v, hn::LoadU(d, products + h * kPanelColumns + v * kLanes));
  }
}

/// Scores one query row, q [heads, depth] with row stride q_stride, against a panel of keys.
/// `products` is scratch of kColumnPadding floats for each head of a block.
template <class Element>
void score_panel(const Element* q, std::int64_t q_stride, const float* weights, std::int64_t heads,
                 std::int64_t depth, const Element* panel, float* products, float* scores) {
  const KMajor<Element> queries{q, q_stride};
  if (heads <= kBlockHeads)
    return score_heads(queries, weights, heads, depth, panel, products, scores);
  const std::int64_t blocks = ceil_div(heads, kBlockHeads);
  std::array<double, kPanelColumns> sums{};
  std::int64_t h = 0;
  for (std::int64_t i = 0; i < blocks; ++i) {
    const std::int64_t next = heads * (i + 1) / blocks;
    score_heads(queries.from(h, 0), weights + h, next - h, depth, panel, products, scores);
    for (std::size_t column = 0; column < sums.size(); ++column) sums[column] += scores[column];
    h = next;
  }
  for (std::size_t i = 0; i < sums.size(); ++i) scores[i] = static_cast<float>(sums[i]);
}

}  // namespace winnow::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
