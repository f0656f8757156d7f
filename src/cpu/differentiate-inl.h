// SPDX-License-Identifier: Apache-2.0
// p and dS of a block of keys of sparse attention backward, from the products of the keys with q
// and d_out; and whether bf16 holds them. Included once per SIMD target.
#include <algorithm>
#include <cstdint>
#include <limits>

#include <hwy/highway.h>

#include "core/numerics.h"
#include "cpu/attention.h"
#include "cpu/backward_plan.h"
#include "cpu/elements-inl.h"
#include "cpu/exp-inl.h"
#include "cpu/matmul-inl.h"
#include "cpu/pack-inl.h"
#include "cpu/widen-inl.h"

#if defined(WINNOW_CPU_DIFFERENTIATE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef WINNOW_CPU_DIFFERENTIATE_INL_H_
#undef WINNOW_CPU_DIFFERENTIATE_INL_H_
#else
#define WINNOW_CPU_DIFFERENTIATE_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace winnow::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

/// p and scale * dS of one key for kLanes heads.
struct Differential {
  FloatVector p, dS;
};

/// What a head's row gives to all of its keys, for kLanes heads.
class Differentiation {
 public:
  template <class Element>
  Differentiation(const QueryPass<Element>& row, std::int64_t i, float scale, bool has_d_lse)
      : share_(load_elements(row.share + i)),
        lse_(load_elements(row.lse + i)),
        delta_(load_elements(row.delta + i)),
        d_lse_(load_elements(row.d_lse + i)),
        scale_(hn::Set(FloatTag(), scale)),
        has_d_lse_(has_d_lse) {}

  /// From the products of a key with q and with d_out.
  HWY_INLINE Differential operator()(FloatVector qk, FloatVector dp) const {
    const FloatTag d;
    const auto minus_infinity = hn::Set(d, -std::numeric_limits<float>::infinity());
    const auto s = hn::Mul(qk, scale_);
    // A logit of -inf contributes nothing; if all of a row are -inf, s - lse would be NaN.
    const auto is_no_key = hn::Eq(s, minus_infinity);
    const auto of_keys = hn::IfThenZeroElse(is_no_key, probability(d, hn::Sub(s, lse_)));
    const auto p = hn::Mul(share_, of_keys);
    auto dS = hn::Mul(p, hn::Sub(dp, delta_));
    if (has_d_lse_) dS = hn::MulAdd(of_keys, d_lse_, dS);
    return {p, hn::Mul(dS, scale_)};
  }

 private:
  FloatVector share_, lse_, delta_, d_lse_, scale_;
  bool has_d_lse_;
};

/// Turns the products with q and d_out, which stand in the records, into p and scale * dS there.
/// Returns dS^T, the left operand of d_q.
inline MnMajor<float> differentiate(const QueryPass<float>& row, float* records, std::int64_t heads,
                                    std::int64_t count, float scale, bool has_d_lse) {
  const FloatTag d;
  const std::int64_t stride = Records::stride<float>(heads);
  const std::int64_t padding = head_padding(heads);
  for (std::int64_t i = 0; i < padding; i += kLanes) {
    const Differentiation differential(row, i, scale, has_d_lse);
    for (std::int64_t j = 0; j < count; ++j) {
      float* const p_at = records + j * stride + i;
      const auto [p, dS] = differential(hn::LoadU(d, p_at), hn::LoadU(d, p_at + padding));
      hn::StoreU(p, d, p_at);
      hn::StoreU(dS, d, p_at + padding);
    }
  }
  return {records + padding, stride};
}

/// The same from row.products. Records are pairs of heads; the operand has pairs of keys. Updates
/// the magnitudes that bf16_suffices looks at.
inline MnMajor<Bf16Pair> differentiate(const QueryPass<Bf16Pair>& row, Bf16Pair* records,
                                       std::int64_t heads, std::int64_t count, float scale,
                                       bool has_d_lse) {
  const FloatTag d;
  const std::int64_t product_stride = Records::stride<float>(heads);
  const std::int64_t stride = Records::stride<Bf16Pair>(heads);
  const std::int64_t padding = head_padding(heads);
  for (std::int64_t i = 0; i < padding; i += kLanes) {
    const Differentiation differential(row, i, scale, has_d_lse);
    auto largest_p = hn::LoadU(d, row.largest_p + i);
    auto largest_dS = hn::LoadU(d, row.largest_dS + i);
    auto largest_d_q_term = hn::LoadU(d, row.largest_d_q_term + i);
    const auto record_key = [&](std::int64_t j) HWY_ATTR {
      const float* const from = row.products + j * product_stride + i;
      const auto [p, dS] = differential(hn::LoadU(d, from), hn::LoadU(d, from + padding));
      auto* const to = reinterpret_cast<BFloat16*>(records + j * stride) + i;
      store_narrowed(d, p, to);
      store_narrowed(d, dS, to + padding);
      const auto magnitude = hn::Abs(dS);
      const auto term = hn::Mul(magnitude, hn::Set(d, row.key_magnitudes[j]));
      largest_p = hn::Max(largest_p, p);
      largest_dS = hn::Max(largest_dS, magnitude);
      largest_d_q_term = hn::Max(largest_d_q_term, term);
      return dS;
    };
    for (std::int64_t j = 0; j < count; j += 2) {
      const auto first = record_key(j);
      const auto second = j + 1 < count ? record_key(j + 1) : hn::Zero(d);
      store_pairs(first, second, row.dS_pairs + j / 2 * padding + i);
    }
    hn::StoreU(largest_p, d, row.largest_p + i);
    hn::StoreU(largest_dS, d, row.largest_dS + i);
    hn::StoreU(largest_d_q_term, d, row.largest_d_q_term + i);
  }
  return {row.dS_pairs, padding};
}

/// Whether p and dS of every head, rounded to bf16, give the row's gradients. Of d_q, p d_out and
/// dS q the largest term must be far above what is lost where denormals count as 0, that is at most
/// 2^-126 a term: of a denormal product, or times the other factor of a denormal p or dS. It must
/// also be far below infinity, as dS must, since rounding makes them larger. `largest_key` is the
/// largest magnitude in all keys.
inline bool bf16_suffices(const QueryPass<Bf16Pair>& row, const AttentionSizes& n,
                          std::int64_t heads, float largest_key) {
  constexpr float kFarAbove = 0x1p-64f;
  const FloatTag d;
  const auto zero = hn::Zero(d);
  const auto one = hn::Set(d, 1.0f);
  const auto far_below = hn::Set(d, 0x1p100f);
  const std::int64_t stride = padded_stride(heads);
  // Whether the terms of which the largest is left * right neither lose nor overflow.
  const auto is_kept = [&](FloatVector left, FloatVector right) HWY_ATTR {
    const auto is_none = hn::Or(hn::Eq(left, zero), hn::Eq(right, zero));
    const auto to_lose_from = hn::Mul(left, hn::Min(right, one));
    const auto loses_nothing = hn::Ge(to_lose_from, hn::Set(d, kFarAbove));
    return hn::Or(is_none, hn::And(loses_nothing, hn::Le(hn::Mul(left, right), far_below)));
  };
  for (std::int64_t i = 0; i < head_padding(heads); i += kLanes) {
    const auto p = hn::LoadU(d, row.largest_p + i);
    const auto dS = hn::LoadU(d, row.largest_dS + i);
    const auto q = largest_of_columns(row.q + i, stride, row.depth);
    const auto d_out = largest_of_columns(row.d_out + i, stride, elements_of<Bf16Pair>(n.v_dim));
    // The keys differ, so that the largest term is not that of the largest dS.
    const auto d_q_term = hn::LoadU(d, row.largest_d_q_term + i);
    const auto far_above_d_q = hn::Set(d, kFarAbove * std::max(largest_key, 1.0f));
    const auto loses_no_d_q = hn::Or(hn::Eq(dS, zero), hn::Ge(d_q_term, far_above_d_q));
    const auto is_finite = hn::And(hn::Le(dS, far_below), hn::Le(d_q_term, far_below));
    const auto d_kv_is_kept = hn::And(is_kept(p, d_out), is_kept(dS, q));
    const auto suffices = hn::And(is_finite, hn::And(loses_no_d_q, d_kv_is_kept));
    if (!hn::AllTrue(d, suffices)) return false;
  }
  return true;
}

}  // namespace winnow::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
