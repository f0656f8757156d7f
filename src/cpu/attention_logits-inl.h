// SPDX-License-Identifier: Apache-2.0
// Products of one query row with blocks of gathered keys, a vector along the heads; for the
// indexer's target and its warm-up loss. Included once per SIMD target.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>

#include <hwy/highway.h>

#include "core/threads.h"
#include "core/view.h"
#include "cpu/exp-inl.h"
#include "cpu/index_scores-inl.h"
#include "cpu/matmul-inl.h"
#include "cpu/pack-inl.h"
#include "cpu/simd.h"
#include "winnow/tensor.h"

#ifndef WINNOW_CPU_ATTENTION_LOGITS_ONCE_
#define WINNOW_CPU_ATTENTION_LOGITS_ONCE_
namespace winnow::cpu {

/// Keys that are worked on together.
inline constexpr std::int64_t kKeyBlock = 128;

/// Sizes of a query row q[t] [heads, dim] and of its products with a block of keys.
struct RowProductsPlan {
  std::int64_t heads, dim;
  std::int64_t head_stride, row_stride;
  std::int64_t kept_keys;  // whose products there is room for

  explicit RowProductsPlan(const Tensor& q, std::int64_t most_kept = kKeyBlock)
      : heads(q.shape[1]),
        dim(q.shape[2]),
        head_stride(padded_stride(heads)),
        row_stride(padded_stride(dim)),
        kept_keys(std::max(most_kept, kKeyBlock)) {}
  std::size_t bytes() const {
    return Scratch::bytes<float>(dim * head_stride) + Scratch::bytes<float>(4 * row_stride) +
           Scratch::bytes<float>(kKeyBlock * row_stride) +
           Scratch::bytes<float>(kept_keys * head_stride) + Scratch::bytes<float>(head_stride);
  }
};

/// log(exp(a) + exp(b))
inline double log_add_exp(double a, double b) {
  const double larger = std::max(a, b);
  if (std::isinf(larger)) return larger;
  return larger + std::log1p(std::exp(std::min(a, b) - larger));
}

/// The tensor without its first rows.
inline Tensor from_row(Tensor tensor, std::int64_t row) {
  tensor.data =
      static_cast<char*>(tensor.data) + row * tensor.stride[0] * element_bytes(tensor.dtype);
  tensor.shape[0] -= row;
  return tensor;
}

}  // namespace winnow::cpu
#endif

#if defined(WINNOW_CPU_ATTENTION_LOGITS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef WINNOW_CPU_ATTENTION_LOGITS_INL_H_
#undef WINNOW_CPU_ATTENTION_LOGITS_INL_H_
#else
#define WINNOW_CPU_ATTENTION_LOGITS_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace winnow::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

/// q[t] . k for blocks of keys.
class RowProducts {
 public:
  RowProducts(const RowProductsPlan& plan, Scratch& scratch)
      : plan_(plan),
        q_(scratch.take<float>(plan.dim * plan.head_stride)),
        spare_(scratch.take<float>(4 * plan.row_stride)),
        keys_(scratch.take<float>(kKeyBlock * plan.row_stride)),
        products_(scratch.take<float>(plan.kept_keys * plan.head_stride)),
        per_head(scratch.take<float>(plan.head_stride)) {}

  void load(const Tensor& q, std::int64_t t) {
    transpose_rows(slice(q, t), 0, plan_.heads, q_.data(), plan_.head_stride, spare_.data());
  }
  /// Products with rows keys[i] of `k`; heads behind the last give 0, if the key is finite.
  void multiply_gathered(const Tensor& k, const std::int32_t* keys, std::int64_t count) {
    gather_rows(k, keys, count, keys_.data(), plan_.row_stride);
    multiply_loaded(count, 0);
  }
  /// Products with rows begin + i of `k`, kept as those of key place + i.
  void multiply_range(const Tensor& k, std::int64_t begin, std::int64_t count, std::int64_t place) {
    widen_rows(k, begin, count, keys_.data(), plan_.row_stride);
    multiply_loaded(count, place);
  }
  const RowProductsPlan& plan() const { return plan_; }
  std::int64_t heads() const { return plan_.heads; }
  /// Of key i and the heads from h on.
  FloatVector at(std::int64_t i, std::int64_t h) const {
    return hn::LoadU(FloatTag(), products_.data() + i * plan_.head_stride + h);
  }

 private:
  void multiply_loaded(std::int64_t count, std::int64_t place) {
    multiply_deep(RowByRow{keys_.data(), plan_.row_stride}, count, q_.data(), plan_.head_stride,
                  plan_.heads, plan_.dim, products_.data() + place * plan_.head_stride,
                  plan_.head_stride);
  }
  RowProductsPlan plan_;
  std::span<float> q_;         // [dim, heads]
  std::span<float> spare_;     // for the transposition
  std::span<float> keys_;      // [kKeyBlock, dim]
  std::span<float> products_;  // [kept_keys, heads]

 public:
  std::span<float> per_head;  // the caller's: one number a head, up to whole vectors
};

/// Lanes that hold a head.
HWY_INLINE hn::Mask<FloatTag> heads_from(std::int64_t h, std::int64_t heads) {
  return hn::FirstN(FloatTag(), static_cast<std::size_t>(std::min(heads - h, kLanes)));
}

/// Puts log(exp(lse) + exp(sink)) of row t into products.per_head.
inline void load_log_sums(const Tensor& lse, const Tensor& sink, std::int64_t t,
                          RowProducts& products) {
  const View<const float, 2> row(lse);
  const View<const float, 1> sinks(sink);
  std::fill(products.per_head.begin(), products.per_head.end(), 0.0f);
  for (std::int64_t h = 0; h < products.heads(); ++h) {
    products.per_head[h] =
        static_cast<float>(sink ? log_add_exp(row(t, h), sinks(h)) : double{row(t, h)});
  }
}

/// sum_h exp(scale * a[i,h] - log_sum[h]); a logit of -inf is no key.
inline float target_of(const RowProducts& products, std::int64_t i, float scale) {
  const FloatTag d;
  auto sum = hn::Zero(d);
  for (std::int64_t h = 0; h < products.heads(); h += kLanes) {
    const auto logit = hn::Mul(hn::Set(d, scale), products.at(i, h));
    const auto p = exp(d, hn::Sub(logit, hn::LoadU(d, products.per_head.data() + h)));
    const auto is_no_key = hn::Eq(logit, hn::Set(d, -std::numeric_limits<float>::infinity()));
    sum = hn::Add(
        sum, hn::IfThenElseZero(heads_from(h, products.heads()), hn::IfThenZeroElse(is_no_key, p)));
  }
  return hn::GetLane(hn::SumOfLanes(d, sum));
}

/// sum_h weights[h] * relu(a[i,h]), with the weights in products.per_head.
inline float score_of(const RowProducts& products, std::int64_t i) {
  const FloatTag d;
  auto sum = hn::Zero(d);
  for (std::int64_t h = 0; h < products.heads(); h += kLanes) {
    const auto term = hn::Mul(hn::LoadU(d, products.per_head.data() + h), relu(products.at(i, h)));
    sum = hn::Add(sum, hn::IfThenElseZero(heads_from(h, products.heads()), term));
  }
  return hn::GetLane(hn::SumOfLanes(d, sum));
}

}  // namespace winnow::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
