// SPDX-License-Identifier: Apache-2.0
// Sparse attention forward. A task is one query row and a group of its heads; it goes through the
// row's keys block by block:
//   keys    a block of keys, gathered and widened once for all heads of the group  [keys, qk_dim]
//   scores  keys x q^T, then their exponentials: keys down, heads across           [keys, heads]
//   sums    scores^T x keys, the sums of values                                    [heads, v_dim]
// With heads across, maxima and sums over keys need no sum across lanes, and scores are already
// the transposed left side of the second product. The block and what the group keeps (q^T and the
// sums) stay in the second cache, panels of them in the first.
#include <algorithm>
#include <cmath>
#include <limits>

#include "core/refusals.h"
#include "core/threads.h"
#include "core/view.h"
#include "cpu/attention.h"
#include "cpu/ops.h"
#include "cpu/plan.h"
#include "cpu/simd.h"
#include "cpu/valid_keys.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/sparse_attention_forward.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "cpu/exp-inl.h"
#include "cpu/matmul-inl.h"
#include "cpu/pack-inl.h"
#include "cpu/widen-inl.h"

#ifndef WINNOW_CPU_SPARSE_ATTENTION_FORWARD_ONCE_
#define WINNOW_CPU_SPARSE_ATTENTION_FORWARD_ONCE_
namespace winnow::cpu {
namespace {

/// Keys a block: the depth of the second product, which each time reads and writes all sums.
constexpr std::int64_t kBlockKeys = 96;

/// A row's scratch.
struct ForwardRow {
  static std::size_t bytes(const AttentionSizes& n, std::int64_t heads) {
    return Scratch::bytes<float>(n.qk_dim * padded_stride(heads)) +
           Scratch::bytes<float>(kBlockKeys * padded_stride(n.qk_dim)) +
           Scratch::bytes<float>(kBlockKeys * padded_stride(heads)) +
           Scratch::bytes<float>(heads * padded_stride(n.v_dim)) +
           4 * Scratch::bytes<float>(padded_columns(heads)) +
           Scratch::bytes<std::int32_t>(kBlockKeys);
  }
  ForwardRow(const AttentionSizes& n, std::int64_t heads, Scratch& scratch)
      : q(scratch.take<float>(n.qk_dim * padded_stride(heads)).data()),
        keys(scratch.take<float>(kBlockKeys * padded_stride(n.qk_dim)).data()),
        scores(scratch.take<float>(kBlockKeys * padded_stride(heads)).data()),
        sums(scratch.take<float>(heads * padded_stride(n.v_dim)).data()),
        largest(scratch.take<float>(padded_columns(heads)).data()),
        shift(scratch.take<float>(padded_columns(heads)).data()),
        weight(scratch.take<float>(padded_columns(heads)).data()),
        factor(scratch.take<float>(padded_columns(heads)).data()),
        key_rows(scratch.take<std::int32_t>(kBlockKeys).data()) {}

  float* q;                // [qk_dim, heads]
  float* keys;             // [kBlockKeys, qk_dim]
  float* scores;           // [kBlockKeys, heads]
  float* sums;             // [heads, v_dim]  sum_j exp(s_j - shift) v_j
  float* largest;          // [heads]         of all s_j so far
  float* shift;            // [heads]         near `largest`; -inf before the first key
  float* weight;           // [heads]         sum_j exp(s_j - shift)
  float* factor;           // [heads]         by which a new shift scales sums and weight
  std::int32_t* key_rows;  // [kBlockKeys]
};

}  // namespace
}  // namespace winnow::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace winnow::cpu::HWY_NAMESPACE {
namespace {

/// From raw products to exponentials, for kLanes heads. Returns whether the shift has moved.
HWY_INLINE bool exponentiate(float* scores, std::int64_t stride, std::int64_t count, float scale,
                             float* largest, float* shift, float* weight, float* factor) {
  // While the largest score grows by less than this the old shift serves: exponentials stay far
  // from overflow, and sums need not be scaled.
  constexpr float kSlack = 16;
  const FloatTag d;
  const auto scales = hn::Set(d, scale);
  const auto minus_infinity = hn::Set(d, -std::numeric_limits<float>::infinity());
  auto block_largest = minus_infinity;
  for (std::int64_t j = 0; j < count; ++j) {
    const auto s = hn::Mul(hn::LoadU(d, scores + j * stride), scales);
    block_largest = hn::IfThenElse(hn::Gt(s, block_largest), s, block_largest);  // not NaN
  }
  const auto old_shift = hn::LoadU(d, shift);
  const auto moves = hn::Gt(block_largest, hn::Add(old_shift, hn::Set(d, kSlack)));
  const auto new_shift = hn::IfThenElse(moves, block_largest, old_shift);
  hn::StoreU(hn::Max(hn::LoadU(d, largest), block_largest), d, largest);
  hn::StoreU(new_shift, d, shift);

  // Where all scores are -inf there is nothing to shift by: -inf - -inf would be NaN.
  const auto finite_shift = hn::IfThenZeroElse(hn::Eq(new_shift, minus_infinity), new_shift);
  auto sum = hn::Zero(d);
  for (std::int64_t j = 0; j < count; ++j) {
    float* const at = scores + j * stride;
    const auto p = exp(d, hn::MulSub(hn::LoadU(d, at), scales, finite_shift));
    hn::StoreU(p, d, at);
    sum = hn::Add(sum, p);
  }
  const auto scaled_by =
      hn::IfThenElse(moves, exp(d, hn::Sub(old_shift, finite_shift)), hn::Set(d, 1.0f));
  hn::StoreU(scaled_by, d, factor);
  hn::StoreU(hn::MulAdd(hn::LoadU(d, weight), scaled_by, sum), d, weight);
  return !hn::AllFalse(d, moves);
}

void scale_row(float* row, float factor, std::int64_t columns) {
  const FloatTag d;
  const auto factors = hn::Set(d, factor);
  for (std::int64_t i = 0; i < columns; i += kLanes) {
    hn::StoreU(hn::Mul(hn::LoadU(d, row + i), factors), d, row + i);
  }
}

void finish_heads(const SparseAttentionForward& args, const ForwardRow& row, std::int64_t t,
                  HeadRange heads, bool has_keys) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const std::int64_t v_dim = args.out.shape[2];
  const View<const float, 1> sink(args.sink);
  const View<float, 2> lse(args.lse);
  const View<float, 2> max_logits(args.max_logits);
  for (std::int64_t i = 0; i < heads.count; ++i) {
    const std::int64_t h = heads.begin + i;
    const double sum = has_keys ? row.weight[i] : 0.0;
    // The weight of the sink beside exponentials that have been shifted. Past the range of double
    // it is infinite and the row's output 0, as it is to be.
    const double sink_weight =
        sink && sum != 0 ? std::exp(static_cast<double>(sink(h)) - row.shift[i]) : 0.0;
    lse(t, h) = sum != 0 ? static_cast<float>(row.shift[i] + std::log(sum)) : -kInfinity;
    if (max_logits) max_logits(t, h) = has_keys ? row.largest[i] : -kInfinity;
    float* const sums = row.sums + i * padded_stride(v_dim);
    // A NaN of a key stays, whatever the sink.
    const bool is_zero =
        sum == 0 || (sink_weight == std::numeric_limits<double>::infinity() && !std::isnan(sum));
    if (is_zero) std::fill(sums, sums + v_dim, 0.0f);
    const float factor = is_zero ? 1.0f : static_cast<float>(1 / (sum + sink_weight));
    narrow_row(args.out.dtype, sums, factor, row_of(args.out, t, h), v_dim);
  }
}

void attend(const SparseAttentionForward& args, std::int64_t t, HeadRange heads, Scratch scratch) {
  const AttentionSizes n = attention_sizes(args);
  const ForwardRow row(n, heads.count, scratch);
  const std::int64_t head_stride = padded_stride(heads.count);
  const std::int64_t key_stride = padded_stride(n.qk_dim);
  const std::int64_t value_stride = padded_stride(n.v_dim);

  ValidKeys keys(args.indices, args.lengths, n.keys, t);
  std::int64_t count = keys.take(kBlockKeys, row.key_rows);
  const bool has_keys = count > 0;
  if (has_keys) {
    // The block of keys is free until the first of them are gathered.
    transpose_rows(slice(args.q, t), heads.begin, heads.count, row.q, head_stride, row.keys);
    constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
    std::fill_n(row.largest, padded_columns(heads.count), kMinusInfinity);
    std::fill_n(row.shift, padded_columns(heads.count), kMinusInfinity);
    std::fill_n(row.weight, padded_columns(heads.count), 0.0f);
  }
  for (bool is_first = true; count > 0; is_first = false) {
    gather_rows(args.kv, row.key_rows, count, row.keys, key_stride);
    multiply_deep(RowByRow{row.keys, key_stride}, count, row.q, head_stride, heads.count, n.qk_dim,
                  row.scores, head_stride);
    bool has_moved = false;
    for (std::int64_t i = 0; i < heads.count; i += kLanes) {
      has_moved |= exponentiate(row.scores + i, head_stride, count, args.scale, row.largest + i,
                                row.shift + i, row.weight + i, row.factor + i);
    }
    for (std::int64_t i = 0; has_moved && !is_first && i < heads.count; ++i) {
      if (row.factor[i] != 1) scale_row(row.sums + i * value_stride, row.factor[i], n.v_dim);
    }
    multiply_deep(Transposed{row.scores, head_stride}, heads.count, row.keys, key_stride, n.v_dim,
                  count, row.sums, value_stride, !is_first);
    count = keys.take(kBlockKeys, row.key_rows);
  }
  finish_heads(args, row, t, heads, has_keys);
}

}  // namespace
}  // namespace winnow::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace winnow::cpu {
namespace {

HWY_EXPORT(attend);

/// Heads a group: q^T and the sums of so many take about half of a second cache of 1 MiB.
constexpr std::int64_t kGroupHeads = 128;

}  // namespace

std::string why_not(const SparseAttentionForward& args, const Execution& execution) {
  if (args.q.dtype == DType::f64) return refusal::no_f64;
  const AttentionSizes n = attention_sizes(args);
  return over_limit(ForwardRow::bytes(n, HeadGroups(n.heads, n.qk_dim, kGroupHeads).most()),
                    execution);
}

std::size_t workspace_bytes(const SparseAttentionForward& args, const Execution& execution) {
  const AttentionSizes n = attention_sizes(args);
  const std::size_t lane = ForwardRow::bytes(n, HeadGroups(n.heads, n.qk_dim, kGroupHeads).most());
  return lane * static_cast<std::size_t>(lane_count(execution, lane));
}

void run(const SparseAttentionForward& args, const Execution& execution) {
  const AttentionSizes n = attention_sizes(args);
  const HeadGroups groups(n.heads, n.qk_dim, kGroupHeads);
  const auto attend_on_target = HWY_DYNAMIC_DISPATCH(attend);
  parallel_for(execution, n.tokens * groups.count(), ForwardRow::bytes(n, groups.most()),
               [&](std::int64_t i, Scratch scratch) {
                 attend_on_target(args, i / groups.count(), groups[i % groups.count()], scratch);
               });
}

}  // namespace winnow::cpu
#endif
