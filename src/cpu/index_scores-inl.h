// SPDX-License-Identifier: Apache-2.0
// The indexer's scores of a panel of keys. Included once per SIMD target.
//
// A panel holds kPanelColumns keys side by side, so that a vector holds one channel of many keys
// and the relu, the weight and the sum over heads are plain vector arithmetic. Every lane runs the
// same chain: channels in order, then heads in order. So the bits of a score do not depend on where
// in a panel its key stands, and selection and replay get the same ones.
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
    // The exponent's bias grows from 7 to 127 by a product, which is exact for denormals too.
    const auto value = hn::Mul(hn::BitCast(d, hn::ShiftLeft<20>(magnitude)), hn::Set(d, 0x1p120f));
    const auto sign = hn::ShiftLeft<24>(hn::And(bits, hn::Set(u32, 0x80u)));
    const auto number = hn::Or(hn::BitCast(u32, value), sign);
    const auto is_nan = hn::Eq(magnitude, hn::Set(u32, 0x7fu));
    hn::StoreU(hn::BitCast(d, hn::IfThenElse(is_nan, hn::Set(u32, 0x7fc00000u), number)), d,
               to + i);
  }
  for (; i < count; ++i) to[i] = to_float(Float8E4M3{from[i]});
}

/// A row of any type that index_topk takes.
inline void widen_index_row(DType dtype, const void* from, float* to, std::int64_t count) {
  if (dtype == DType::f8_e4m3) return widen_float8_row(from, to, count);
  widen_row(dtype, from, to, count);
}

/// Key s in fp32, times its scale, if there is one.
inline void widen_key(const Tensor& k, const Tensor& k_scale, std::int64_t s, float* to) {
  widen_index_row(k.dtype, row_of(k, s), to, k.shape[1]);
  if (!k_scale) return;
  const float scale = static_cast<const float*>(k_scale.data)[s * k_scale.stride[0]];
  for (std::int64_t d = 0; d < k.shape[1]; ++d) to[d] *= scale;
}

/// Row d of `to` gets channel d of the kPanelColumns rows of `from`. dim is a multiple of 4.
inline void transpose_to_panel(const float* HWY_RESTRICT from, std::int64_t stride,
                               std::int64_t dim, float* HWY_RESTRICT to) {
#if HWY_TARGET == HWY_SCALAR
  for (std::int64_t d = 0; d < dim; ++d) {
    for (std::int64_t i = 0; i < kPanelColumns; ++i)
      to[d * kPanelColumns + i] = from[i * stride + d];
  }
#else
  for (std::int64_t i = 0; i < kPanelColumns; i += 4)
    transpose_four(from + i * stride, stride, dim, to + i, kPanelColumns);
#endif
}

/// max(a, 0) that keeps NaN.
HWY_INLINE FloatVector relu(FloatVector a) {
  return hn::IfThenZeroElse(hn::Lt(a, hn::Zero(FloatTag())), a);
}

/// scores[key] += sum_h weights[h] * relu(a[h, key]), head by head.
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

/// Longer dot products are summed in pieces, through memory: for accuracy and for the cache.
inline constexpr std::int64_t kDirectDepth = 256;

/// The scores of one query row, q [heads, dim] by rows of q_stride, for a panel of keys. `products`
/// is scratch for kColumnPadding floats a head where dim > kDirectDepth.
inline void score_panel(const float* q, std::int64_t q_stride, const float* weights,
                        std::int64_t heads, std::int64_t dim, const float* panel, float* products,
                        float* scores) {
  const FloatTag d;
  for (std::int64_t i = 0; i < kPanelColumns; i += kLanes) hn::StoreU(hn::Zero(d), d, scores + i);
  const RowByRow queries{q, q_stride};
  const AddScores add{weights, scores};
  if (dim <= kDirectDepth) {
    multiply(queries, heads, panel, kPanelColumns, kPanelColumns, dim, add);
    return;
  }
  multiply_deep(queries, heads, panel, kPanelColumns, kPanelColumns, dim, products, kPanelColumns);
  for (std::int64_t h = 0; h < heads; ++h) {
    const AddScores add_head = add.at(h, 0);
    for (int v = 0; v < kTileVectors; ++v)
      add_head(0, v, hn::LoadU(d, products + h * kPanelColumns + v * kLanes));
  }
}

}  // namespace winnow::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
