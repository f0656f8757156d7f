// SPDX-License-Identifier: Apache-2.0
// Dot products of one query row with blocks of keys, vectorised over the heads; for the indexer's
// target and its warm-up loss. Included once per SIMD target.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>

#include <hwy/highway.h>

#include "core/threads.h"
#include "core/view.h"
#include "cpu/exp-inl.h"
#include "cpu/index_scores-inl.h"
#include "cpu/log_add_exp.h"
#include "cpu/matmul-inl.h"
#include "cpu/pack-inl.h"
#include "cpu/simd.h"
#include "winnow/tensor.h"

#ifndef WINNOW_CPU_ATTENTION_LOGITS_ONCE_
#define WINNOW_CPU_ATTENTION_LOGITS_ONCE_
namespace winnow::cpu {

/// Number of keys that are loaded and multiplied together.
inline constexpr std::int64_t kKeyBlock = 128;

/// Sizes of a query row q[t] [heads, dim] and of its dot products with keys.
struct RowProductsPlan {
  std::int64_t heads, dim;
  std::int64_t head_stride;
  std::int64_t kept_keys;   // number of keys whose products are kept at once
  bool with_pairs = false;  // pairs of bf16 are multiplied where none of their products is denormal

  explicit RowProductsPlan(const Tensor& q, std::int64_t max_kept = kKeyBlock)
      : heads(q.shape[1]),
        dim(q.shape[2]),
        head_stride(padded_stride(heads)),
        kept_keys(std::max(max_kept, kKeyBlock)) {}
  /// Of operands of floats; those of pairs take no more.
  std::size_t operand_bytes() const {
    return Scratch::bytes<float>(dim * head_stride) +
           Scratch::bytes<float>(kKeyBlock * padded_stride(dim));
  }
  std::size_t bytes() const {
    return operand_bytes() + Scratch::bytes<float>(kept_keys * head_stride) +
           Scratch::bytes<float>(head_stride);
  }
};

/// The tensor without the rows before `row`.
inline Tensor from_row(Tensor tensor, std::int64_t row) {
  if (row < tensor.shape[0]) {  // else the stride may be anything
    tensor.data =
        static_cast<char*>(tensor.data) + row * tensor.stride[0] * element_bytes(tensor.dtype);
  }
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

/// A query row and a block of keys, in elements.
template <class Element>
struct RowOperands {
  RowOperands(const RowProductsPlan& plan, Scratch scratch)
      : depth(elements_of<Element>(plan.dim)),
        stride(padded_stride(depth)),
        q(scratch.take<Element>(depth * plan.head_stride).data()),
        keys(scratch.take<Element>(kKeyBlock * stride).data()) {}

  /// Loads q^T of a row [heads, dim] if it is not there.
  void load_q(const Tensor& row, std::int64_t head_stride) {
    if (has_q) return;
    transpose_rows(row, 0, row.shape[0], q, head_stride, keys);
    has_q = true;
  }

  std::int64_t depth, stride;
  Element* q;     // [depth, heads]
  Element* keys;  // [kKeyBlock, depth], which serves as scratch of q before
  bool has_q = false;
};

/// Computes q[t] . k for blocks of keys and keeps the products.
class RowProducts {
 public:
  std::span<float> per_head;  // set by the caller: one value per head, padded to whole vectors

  RowProducts(const RowProductsPlan& plan, Scratch& scratch)
      : per_head(scratch.take<float>(plan.head_stride)),
        plan_(plan),
        products_(scratch.take<float>(plan.kept_keys * plan.head_stride)),
        floats_(plan, scratch) {
    if (plan.with_pairs) pairs_.emplace(plan, scratch);
    scratch.take<std::byte>(static_cast<std::int64_t>(plan.operand_bytes()));
  }

  /// The row stays in use until the next one is loaded.
  void load(const Tensor& q, std::int64_t t) {
    row_ = slice(q, t);
    floats_.has_q = false;
    tries_pairs_ = pairs_.has_value();
    if (!tries_pairs_) return;
    pairs_->has_q = false;
    pairs_->load_q(row_, plan_.head_stride);
    least_q_ =
        least_magnitude(pairs_->q, plan_.head_stride, pairs_->depth, padded_columns(plan_.heads));
    tries_pairs_ = have_normal_products(least_q_, 1);
  }
  /// Multiplies with the rows keys[i] of `k`. Padding heads give 0 if the key is finite.
  void multiply_gathered(const Tensor& k, const std::int32_t* keys, std::int64_t count) {
    multiply_rows(count, 0, [&](const auto& of) HWY_ATTR {
      gather_rows(k, keys, count, of.keys, of.stride);
    });
  }
  /// The same with the rows begin + i of `k`; the products are kept at index first_kept + i.
  void multiply_range(const Tensor& k, std::int64_t begin, std::int64_t count,
                      std::int64_t first_kept) {
    multiply_rows(count, first_kept,
                  [&](const auto& of) HWY_ATTR { load_rows(k, begin, count, of.keys, of.stride); });
  }
  const RowProductsPlan& plan() const { return plan_; }
  std::int64_t heads() const { return plan_.heads; }
  /// The products of kept key i with heads h to h + kLanes - 1.
  FloatVector at(std::int64_t i, std::int64_t h) const {
    return hn::LoadU(FloatTag(), products_.data() + i * plan_.head_stride + h);
  }

 private:
  /// Multiplies with keys that load_keys(operands) packs.
  template <class LoadKeys>
  void multiply_rows(std::int64_t count, std::int64_t first_kept, const LoadKeys& load_keys) {
    if constexpr (kMultipliesPairs) {
      if (tries_pairs_ && multiply_pairs(count, first_kept, load_keys)) return;
    }
    floats_.load_q(row_, plan_.head_stride);
    load_keys(floats_);
    multiply_loaded(floats_, count, first_kept);
    if (tries_pairs_) pairs_->has_q = false;
  }
  /// Returns false, and has kept nothing, if denormals could occur.
  template <class LoadKeys>
  bool multiply_pairs(std::int64_t count, std::int64_t first_kept, const LoadKeys& load_keys) {
    floats_.has_q = false;
    pairs_->load_q(row_, plan_.head_stride);
    load_keys(*pairs_);
    const float least_key = least_magnitude(pairs_->keys, pairs_->stride, count, pairs_->depth);
    if (!have_normal_products(least_q_, least_key)) return false;
    multiply_loaded(*pairs_, count, first_kept);
    return true;
  }
  template <class Element>
  void multiply_loaded(const RowOperands<Element>& of, std::int64_t count,
                       std::int64_t first_kept) {
    multiply_blocked(KMajor<Element>{of.keys, of.stride}, count, of.q, plan_.head_stride,
                     plan_.heads, of.depth, products_.data() + first_kept * plan_.head_stride,
                     plan_.head_stride);
  }
  RowProductsPlan plan_;
  Tensor row_;                                  // of q
  std::span<float> products_;                   // [kept_keys, heads]
  RowOperands<float> floats_;                   // they are loaded only if they are multiplied
  std::optional<RowOperands<Bf16Pair>> pairs_;  // in the same memory
  bool tries_pairs_ = false;
  float least_q_ = 0;  // the least magnitude in q but 0
};

/// Mask of the lanes from head h on that hold a head and not padding.
HWY_INLINE hn::Mask<FloatTag> head_mask(std::int64_t h, std::int64_t heads) {
  return hn::FirstN(FloatTag(), static_cast<std::size_t>(std::min(heads - h, kLanes)));
}

/// Sets products.per_head to log(exp(lse) + exp(sink)) of row t.
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

/// The probabilities exp(scale * a[i,h] - log_sum[h]) of a key, summed over heads, where a logit of
/// -inf contributes 0.
inline float target_of_key(const RowProducts& products, std::int64_t i, float scale) {
  const FloatTag d;
  auto sum = hn::Zero(d);
  for (std::int64_t h = 0; h < products.heads(); h += kLanes) {
    const auto logit = hn::Mul(hn::Set(d, scale), products.at(i, h));
    const auto p = probability(d, hn::Sub(logit, hn::LoadU(d, products.per_head.data() + h)));
    const auto is_no_key = hn::Eq(logit, hn::Set(d, -std::numeric_limits<float>::infinity()));
    sum = hn::Add(
        sum, hn::IfThenElseZero(head_mask(h, products.heads()), hn::IfThenZeroElse(is_no_key, p)));
  }
  return hn::GetLane(hn::SumOfLanes(d, sum));
}

/// sum_h weights[h] * relu(a[i,h]), with the weights in products.per_head.
inline float score_of_key(const RowProducts& products, std::int64_t i) {
  const FloatTag d;
  auto sum = hn::Zero(d);
  for (std::int64_t h = 0; h < products.heads(); h += kLanes) {
    const auto term = hn::Mul(hn::LoadU(d, products.per_head.data() + h), relu(products.at(i, h)));
    sum = hn::Add(sum, hn::IfThenElseZero(head_mask(h, products.heads()), term));
  }
  return hn::GetLane(hn::SumOfLanes(d, sum));
}

}  // namespace winnow::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
