// SPDX-License-Identifier: Apache-2.0
// Sparse attention forward with online softmax. A task is one query row and a group of its heads;
// it goes through the keys of the row in blocks:
//   keys         a block of keys, gathered and converted to fp32 once per group  [keys, qk_dim]
//   scores       keys x q^T, then exp(rest * (s - shift))                        [keys, heads]
//   accumulator  += scores^T x keys                                              [heads, v_dim]
// With heads along the vectors, maxima and sums over keys need no operation across lanes, and
// scores are already the MN-major left operand of the second product. The block, q^T and the
// accumulator stay in L2, panels of them in L1. s is a product times the power of two in the scale,
// and a logit is rest * s (core/logit_scale.h).
#include <algorithm>
#include <cmath>
#include <limits>

#include "backend_operators.h"
#include "core/logit_scale.h"
#include "core/refusals.h"
#include "core/threads.h"
#include "core/view.h"
#include "cpu/attention.h"
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

/// Keys per block: the depth of the second product, which reads and writes the whole accumulator.
constexpr std::int64_t kBlockKeys = 96;

/// Scratch of a task.
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
        accumulator(scratch.take<float>(heads * padded_stride(n.v_dim)).data()),
        max_score(scratch.take<float>(padded_columns(heads)).data()),
        shift(scratch.take<float>(padded_columns(heads)).data()),
        exp_sum(scratch.take<float>(padded_columns(heads)).data()),
        rescale(scratch.take<float>(padded_columns(heads)).data()),
        key_rows(scratch.take<std::int32_t>(kBlockKeys).data()) {}

  float* q;                // [qk_dim, heads]
  float* keys;             // [kBlockKeys, qk_dim]
  float* scores;           // [kBlockKeys, heads]
  float* accumulator;      // [heads, v_dim]  sum_j exp(rest * (s_j - shift)) v_j
  float* max_score;        // [heads]         maximum of all s_j so far
  float* shift;            // [heads]         close to max_score; -inf before the first key
  float* exp_sum;          // [heads]         sum_j exp(rest * (s_j - shift))
  float* rescale;          // [heads]         factor of accumulator and exp_sum after a new shift
  std::int32_t* key_rows;  // [kBlockKeys]
};

}  // namespace
}  // namespace winnow::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace winnow::cpu::HWY_NAMESPACE {
namespace {

/// One step of online softmax for kLanes heads: replaces the products in `scores` by
/// exp(rest * (s - shift)). Returns whether the shift has changed.
HWY_INLINE bool exponentiate(float* scores, std::int64_t stride, std::int64_t count,
                             LogitScale scale, float* max_score, float* shift, float* exp_sum,
                             float* rescale) {
  // The old shift is kept until the maximum exceeds it by this: exponentials stay far from
  // overflow, and the accumulator is seldom rescaled.
  constexpr float kSlack = 16;
  const FloatTag d;
  const auto power = hn::Set(d, scale.power);
  const auto rest = hn::Set(d, scale.rest);
  const auto minus_infinity = hn::Set(d, -std::numeric_limits<float>::infinity());
  auto block_max = minus_infinity;
  for (std::int64_t j = 0; j < count; ++j) {
    const auto s = hn::Mul(hn::LoadU(d, scores + j * stride), power);
    block_max = hn::IfThenElse(hn::Gt(s, block_max), s, block_max);  // ignores NaN
  }
  const auto old_shift = hn::LoadU(d, shift);
  const auto changes = hn::Gt(hn::Mul(rest, hn::Sub(block_max, old_shift)), hn::Set(d, kSlack));
  const auto new_shift = hn::IfThenElse(changes, block_max, old_shift);
  hn::StoreU(hn::Max(hn::LoadU(d, max_score), block_max), d, max_score);
  hn::StoreU(new_shift, d, shift);

  // If all scores are -inf the shift is 0, since -inf - -inf would be NaN.
  const auto finite_shift = hn::IfThenZeroElse(hn::Eq(new_shift, minus_infinity), new_shift);
  auto sum = hn::Zero(d);
  for (std::int64_t j = 0; j < count; ++j) {
    float* const at = scores + j * stride;
    // Exact but for the last product, and so 1 where s is the shift.
    const auto p = exp(d, hn::Mul(rest, hn::MulSub(hn::LoadU(d, at), power, finite_shift)));
    hn::StoreU(p, d, at);
    sum = hn::Add(sum, p);
  }
  const auto factors = hn::IfThenElse(
      changes, exp(d, hn::Mul(rest, hn::Sub(old_shift, finite_shift))), hn::Set(d, 1.0f));
  hn::StoreU(factors, d, rescale);
  hn::StoreU(hn::MulAdd(hn::LoadU(d, exp_sum), factors, sum), d, exp_sum);
  return !hn::AllFalse(d, changes);
}

void scale_row(float* row, float factor, std::int64_t columns) {
  const FloatTag d;
  const auto factors = hn::Set(d, factor);
  for (std::int64_t i = 0; i < columns; i += kLanes) {
    hn::StoreU(hn::Mul(hn::LoadU(d, row + i), factors), d, row + i);
  }
}

/// Normalises the accumulator and writes the outputs of the row.
void finish_heads(const SparseAttentionForward& args, const ForwardRow& row, std::int64_t t,
                  HeadRange heads, bool has_keys) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const std::int64_t v_dim = args.out.shape[2];
  const View<const float, 1> sink(args.sink);
  const View<float, 2> lse(args.lse);
  const View<float, 2> max_logits(args.max_logits);
  const LogitScale scale(args.scale);
  for (std::int64_t i = 0; i < heads.count; ++i) {
    const std::int64_t h = heads.begin + i;
    const double sum = has_keys ? row.exp_sum[i] : 0.0;
    const double shift = has_keys ? double{scale.rest} * row.shift[i] : 0.0;
    // exp(sink) on the scale of the shifted exponentials. If it overflows double, the output is 0,
    // which is the correct limit.
    const double sink_exp = sink && sum != 0 ? std::exp(static_cast<double>(sink(h)) - shift) : 0.0;
    lse(t, h) = sum != 0 ? static_cast<float>(shift + std::log(sum)) : -kInfinity;
    if (max_logits) max_logits(t, h) = has_keys ? scale.rest * row.max_score[i] : -kInfinity;
    float* const accumulator = row.accumulator + i * padded_stride(v_dim);
    // A NaN from a key reaches the output whatever the sink is.
    const bool is_zero =
        sum == 0 || (sink_exp == std::numeric_limits<double>::infinity() && !std::isnan(sum));
    if (is_zero) std::fill(accumulator, accumulator + v_dim, 0.0f);
    const float factor = is_zero ? 1.0f : static_cast<float>(1 / (sum + sink_exp));
    narrow_row(args.out.dtype, accumulator, factor, row_of(args.out, t, h), v_dim);
  }
}

/// Computes the outputs of query row t for a range of heads.
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
    // row.keys serves as scratch here: no keys have been gathered yet.
    transpose_rows(slice(args.q, t), heads.begin, heads.count, row.q, head_stride, row.keys);
    constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
    std::fill_n(row.max_score, padded_columns(heads.count), kMinusInfinity);
    std::fill_n(row.shift, padded_columns(heads.count), kMinusInfinity);
    std::fill_n(row.exp_sum, padded_columns(heads.count), 0.0f);
  }
  for (bool is_first = true; count > 0; is_first = false) {
    gather_rows(args.kv, row.key_rows, count, row.keys, key_stride);
    multiply_blocked(KMajor{row.keys, key_stride}, count, row.q, head_stride, heads.count, n.qk_dim,
                     row.scores, head_stride);
    bool has_new_shift = false;
    for (std::int64_t i = 0; i < heads.count; i += kLanes) {
      has_new_shift |=
          exponentiate(row.scores + i, head_stride, count, LogitScale(args.scale),
                       row.max_score + i, row.shift + i, row.exp_sum + i, row.rescale + i);
    }
    for (std::int64_t i = 0; has_new_shift && !is_first && i < heads.count; ++i) {
      if (row.rescale[i] != 1)
        scale_row(row.accumulator + i * value_stride, row.rescale[i], n.v_dim);
    }
    multiply_blocked(MnMajor{row.scores, head_stride}, heads.count, row.keys, key_stride, n.v_dim,
                     count, row.accumulator, value_stride, !is_first);
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

/// Heads per group: their q^T and accumulator take about half of an L2 of 1 MiB.
constexpr std::int64_t kGroupHeads = 128;

}  // namespace

std::string why_not(const SparseAttentionForward& args, const Execution& execution) {
  if (args.q.dtype == DType::f64) return refusal::no_f64;
  const AttentionSizes n = attention_sizes(args);
  return over_limit(ForwardRow::bytes(n, HeadGroups(n.heads, n.qk_dim, kGroupHeads).max_size()),
                    execution);
}

std::size_t workspace_bytes(const SparseAttentionForward& args, const Execution& execution) {
  const AttentionSizes n = attention_sizes(args);
  return all_lanes_bytes(
      execution, ForwardRow::bytes(n, HeadGroups(n.heads, n.qk_dim, kGroupHeads).max_size()));
}

void run(const SparseAttentionForward& args, const Execution& execution) {
  const AttentionSizes n = attention_sizes(args);
  const HeadGroups groups(n.heads, n.qk_dim, kGroupHeads);
  const auto attend_on_target = HWY_DYNAMIC_DISPATCH(attend);
  parallel_for(execution, n.tokens * groups.count(), ForwardRow::bytes(n, groups.max_size()),
               [&](std::int64_t i, Scratch scratch) {
                 attend_on_target(args, i / groups.count(), groups[i % groups.count()], scratch);
               });
}

}  // namespace winnow::cpu
#endif
