// SPDX-License-Identifier: Apache-2.0
// The KL divergence of one row, for index_loss and dense_index_loss. In double, because its terms
// nearly cancel once the indexer matches its target. Included once per SIMD target.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>

#include <hwy/highway.h>

#include "cpu/simd.h"

#if defined(WINNOW_CPU_DIVERGENCE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef WINNOW_CPU_DIVERGENCE_INL_H_
#undef WINNOW_CPU_DIVERGENCE_INL_H_
#else
#define WINNOW_CPU_DIVERGENCE_INL_H_
#endif

#include <hwy/contrib/math/math-inl.h>

HWY_BEFORE_NAMESPACE();
namespace winnow::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using DoubleTag = hn::ScalableTag<double>;
using DoubleVector = hn::Vec<DoubleTag>;

/// Loads a vector of floats as doubles; lanes from `count` on get `filler`.
HWY_INLINE DoubleVector load_doubles(const float* from, std::int64_t count, float filler) {
  const DoubleTag d;
  const hn::Rebind<float, DoubleTag> half;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  if (count >= lanes) return hn::PromoteTo(d, hn::LoadU(half, from));
  HWY_ALIGN float padded[HWY_LANES(double)];
  std::fill_n(padded, lanes, filler);
  std::copy_n(from, count, padded);
  return hn::PromoteTo(d, hn::Load(half, padded));
}

/// Stores the first `count` lanes, rounded to float.
HWY_INLINE void store_floats(DoubleVector values, float* to, std::int64_t count) {
  const DoubleTag d;
  const hn::Rebind<float, DoubleTag> half;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const auto narrow = hn::DemoteTo(half, values);
  if (count >= lanes) return hn::StoreU(narrow, half, to);
  HWY_ALIGN float padded[HWY_LANES(double)];
  hn::Store(narrow, half, padded);
  std::copy_n(padded, count, to);
}

/// exp(x), and NaN if x is not finite.
HWY_INLINE DoubleVector exp_or_nan(DoubleVector x) {
  const DoubleTag d;
  return hn::MulAdd(x, hn::Zero(d), hn::Exp(d, x));
}

/// Returns KL(target / sum target || softmax(scores)) over the entries whose score is not -inf, and
/// writes its gradient to d_scores, 0 for all other entries. Loss and gradient are 0 if there are
/// fewer than two such entries or the target sums to 0.
inline float divergence(std::span<const float> scores, const float* target, float* d_scores) {
  const DoubleTag d;
  constexpr float kNone = -std::numeric_limits<float>::infinity();
  const auto none = hn::Set(d, static_cast<double>(kNone));
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const auto size = static_cast<std::int64_t>(scores.size());
  const auto for_each_vector = [&](const auto& use) HWY_ATTR {
    for (std::int64_t j = 0; j < size; j += lanes) {
      const auto score = load_doubles(scores.data() + j, size - j, kNone);
      use(j, score, hn::Not(hn::Eq(score, none)), load_doubles(target + j, size - j, 0.0f));
    }
  };
  const auto total = [&](DoubleVector sum) HWY_ATTR { return hn::GetLane(hn::SumOfLanes(d, sum)); };

  std::int64_t valid = 0;
  auto target_sums = hn::Zero(d);
  auto max_scores = none;
  for_each_vector([&](std::int64_t, auto score, auto is_valid, auto target_here) HWY_ATTR {
    valid += static_cast<std::int64_t>(hn::CountTrue(d, is_valid));
    target_sums = hn::Add(target_sums, hn::IfThenElseZero(is_valid, target_here));
    max_scores = hn::IfThenElse(hn::Gt(score, max_scores), score, max_scores);
  });
  const double target_sum = total(target_sums);
  std::fill_n(d_scores, size, 0.0f);
  if (valid < 2 || target_sum == 0) return 0;

  const double largest = hn::GetLane(hn::MaxOfLanes(d, max_scores));
  auto exp_sums = hn::Zero(d);
  for_each_vector([&](std::int64_t, auto score, auto is_valid, auto) HWY_ATTR {
    const auto shifted = hn::Sub(score, hn::Set(d, largest));
    exp_sums = hn::Add(exp_sums, hn::IfThenElseZero(is_valid, exp_or_nan(shifted)));
  });
  // Apart from `largest`, in which it would be lost if that is large.
  const double log_sum = std::log(total(exp_sums));

  const auto nan = hn::Set(d, std::numeric_limits<double>::quiet_NaN());
  auto loss = hn::Zero(d);
  for_each_vector([&](std::int64_t j, auto score, auto is_valid, auto target_here) HWY_ATTR {
    const auto p_target = hn::Div(target_here, hn::Set(d, target_sum));
    const auto log_softmax = hn::Sub(hn::Sub(score, hn::Set(d, largest)), hn::Set(d, log_sum));
    const auto log_target =
        hn::IfThenElse(hn::Lt(p_target, hn::Zero(d)), nan, hn::Log(d, p_target));
    const auto term = hn::Mul(p_target, hn::Sub(log_target, log_softmax));
    const auto counts = hn::AndNot(hn::Eq(p_target, hn::Zero(d)), is_valid);
    loss = hn::Add(loss, hn::IfThenElseZero(counts, term));
    const auto gradient = hn::Sub(exp_or_nan(log_softmax), p_target);
    store_floats(hn::IfThenElseZero(is_valid, gradient), d_scores + j, size - j);
  });
  return static_cast<float>(total(loss));
}

}  // namespace winnow::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
