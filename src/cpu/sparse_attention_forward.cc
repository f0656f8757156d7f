// SPDX-License-Identifier: Apache-2.0
// Sparse attention forward with online softmax. A task is one query row and a group of its heads;
// it goes through the keys of the row in blocks:
//   keys         a block of keys, gathered and converted once per group  [keys, qk_dim]
//   scores       keys x q^T                                              [keys, heads]
//   p            exp(rest * (scores - shift) + log_factor)               [keys, heads]
//   accumulator  += p^T x values, the first v_dim columns of keys        [heads, v_dim]
// With heads along the vectors, maxima and sums over keys need no operation across lanes, and
// p is already the MN-major left operand of the second product. The block, q^T and the
// accumulator stay in L2, panels of them in L1. s is a product times the power of two in the scale,
// and a logit is rest * s (core/logit_scale.h).
//
// Kernel `simd` multiplies floats. Kernel `avx512_bf16` multiplies pairs of bf16, p rounded to
// bf16, but floats in blocks in which denormals, which count as 0 in products of pairs, could
// occur.
#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

#include "backend_operators.h"
#include "core/logit_scale.h"
#include "core/refusals.h"
#include "core/threads.h"
#include "core/view.h"
#include "cpu/attention.h"
#include "cpu/bf16_pairs.h"
#include "cpu/plan.h"
#include "cpu/simd.h"
#include "cpu/valid_keys.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/sparse_attention_forward.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "cpu/elements-inl.h"
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

/// What the products of a block read. The floats and the pairs of a task use the same memory.
template <class Element>
struct Operands {
  static constexpr bool kArePairs = kElementDepth<Element> > 1;
  static constexpr std::int64_t kBlockRows = elements_of<Element>(kBlockKeys);

  static std::size_t bytes(const AttentionSizes& n, std::int64_t heads) {
    const std::int64_t depth = elements_of<Element>(n.qk_dim);
    const std::size_t copies = Scratch::bytes<Element>(kBlockRows * padded_stride(n.v_dim)) +
                               2 * Scratch::bytes<Element>(kBlockRows * padded_stride(heads));
    return Scratch::bytes<Element>(depth * padded_stride(heads)) +
           Scratch::bytes<Element>(kBlockKeys * padded_stride(depth)) + (kArePairs ? copies : 0);
  }
  Operands(const AttentionSizes& n, std::int64_t heads, Scratch scratch)
      : depth(elements_of<Element>(n.qk_dim)),
        q(scratch.take<Element>(depth * padded_stride(heads)).data()),
        keys(scratch.take<Element>(kBlockKeys * padded_stride(depth)).data()) {
    if constexpr (kArePairs) {
      value_stride = padded_stride(n.v_dim);
      values = scratch.take<Element>(kBlockRows * value_stride).data();
      p = scratch.take<Element>(kBlockRows * padded_stride(heads)).data();
      p_rest = scratch.take<Element>(kBlockRows * padded_stride(heads)).data();
    } else {
      value_stride = padded_stride(depth);
      values = keys;
    }
  }

  std::int64_t depth;         // of q and keys, in elements
  std::int64_t value_stride;  // between rows of values
  Element* q;                 // [depth, heads]
  Element* keys;              // [kBlockKeys, depth]
  Element* values;            // [kBlockRows, v_dim]  of floats: keys; of pairs: along the keys
  // Of pairs alone; floats are in the place of the scores.
  Element* p = nullptr;       // [kBlockRows, heads]
  Element* p_rest = nullptr;  // [kBlockRows, heads]  what p lost in rounding, or 0
  float least_q = 0;          // the least magnitude in q but 0
  bool has_q = false;
};

/// Scratch of a task, but for the operands.
struct ForwardRow {
  static std::size_t bytes(const AttentionSizes& n, std::int64_t heads) {
    return Scratch::bytes<float>(kBlockKeys * padded_stride(heads)) +
           Scratch::bytes<float>(heads * padded_stride(n.v_dim)) +
           5 * Scratch::bytes<float>(padded_columns(heads)) +
           Scratch::bytes<std::int32_t>(kBlockKeys);
  }
  ForwardRow(const AttentionSizes& n, std::int64_t heads, Scratch& scratch)
      : scores(scratch.take<float>(kBlockKeys * padded_stride(heads)).data()),
        accumulator(scratch.take<float>(heads * padded_stride(n.v_dim)).data()),
        max_score(scratch.take<float>(padded_columns(heads)).data()),
        shift(scratch.take<float>(padded_columns(heads)).data()),
        exp_sum(scratch.take<float>(padded_columns(heads)).data()),
        lost_sum(scratch.take<float>(padded_columns(heads)).data()),
        rescale(scratch.take<float>(padded_columns(heads)).data()),
        key_rows(scratch.take<std::int32_t>(kBlockKeys).data()) {}

  float log_factor = 0;    // p_j = exp(rest * (s_j - shift) + log_factor)
  float* scores;           // [kBlockKeys, heads]
  float* accumulator;      // [heads, v_dim]  sum_j p_j v_j
  float* max_score;        // [heads]         maximum of all s_j so far
  float* shift;            // [heads]         close to max_score; -inf before the first key
  float* exp_sum;          // [heads]         sum_j p_j
  float* lost_sum;         // [heads]         the part of exp_sum that the accumulator has not
  float* rescale;          // [heads]         factor of the three sums after a new shift
  std::int32_t* key_rows;  // [kBlockKeys]
};

}  // namespace
}  // namespace winnow::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace winnow::cpu::HWY_NAMESPACE {
namespace {

/// One step of online softmax for the kLanes heads from `head` on: replaces their products in
/// row.scores by p. Returns whether the shift has changed.
HWY_INLINE bool exponentiate(const ForwardRow& row, std::int64_t head, std::int64_t stride,
                             std::int64_t count, LogitScale scale) {
  // The old shift is kept until the maximum exceeds it by this: exponentials stay far from
  // overflow, and the accumulator is seldom rescaled.
  constexpr float kSlack = 16;
  const FloatTag d;
  const auto power = hn::Set(d, scale.power);
  const auto rest = hn::Set(d, scale.rest);
  const auto log_factor = hn::Set(d, row.log_factor);
  float* const scores = row.scores + head;
  const auto minus_infinity = hn::Set(d, -std::numeric_limits<float>::infinity());
  auto block_max = minus_infinity;
  for (std::int64_t j = 0; j < count; ++j) {
    const auto s = hn::Mul(hn::LoadU(d, scores + j * stride), power);
    block_max = hn::IfThenElse(hn::Gt(s, block_max), s, block_max);  // ignores NaN
  }
  const auto old_shift = hn::LoadU(d, row.shift + head);
  const auto changes = hn::Gt(hn::Mul(rest, hn::Sub(block_max, old_shift)), hn::Set(d, kSlack));
  const auto new_shift = hn::IfThenElse(changes, block_max, old_shift);
  hn::StoreU(hn::Max(hn::LoadU(d, row.max_score + head), block_max), d, row.max_score + head);
  hn::StoreU(new_shift, d, row.shift + head);

  // If all scores are -inf the shift is 0, since -inf - -inf would be NaN.
  const auto finite_shift = hn::IfThenZeroElse(hn::Eq(new_shift, minus_infinity), new_shift);
  auto sum = hn::Zero(d);
  for (std::int64_t j = 0; j < count; ++j) {
    float* const at = scores + j * stride;
    // The difference is exact, so that the exponent is log_factor where s is the shift.
    const auto above_shift = hn::MulSub(hn::LoadU(d, at), power, finite_shift);
    const auto p = exp(d, hn::MulAdd(rest, above_shift, log_factor));
    hn::StoreU(p, d, at);
    sum = hn::Add(sum, p);
  }
  const auto factors = hn::IfThenElse(
      changes, exp(d, hn::Mul(rest, hn::Sub(old_shift, finite_shift))), hn::Set(d, 1.0f));
  float* const exp_sum = row.exp_sum + head;
  float* const lost_sum = row.lost_sum + head;
  hn::StoreU(factors, d, row.rescale + head);
  hn::StoreU(hn::MulAdd(hn::LoadU(d, exp_sum), factors, sum), d, exp_sum);
  hn::StoreU(hn::Mul(hn::LoadU(d, lost_sum), factors), d, lost_sum);
  return !hn::AllFalse(d, changes);
}

/// Rounds p to pairs of keys. What it loses is added to lost_sum: where one key has nearly all of
/// p, its rounding would else be a factor of out. Heads with large logits keep it in p_rest, since
/// the products, whose rounding grows with them, leave no room for it. Returns whether there are
/// any.
inline bool round_p(const ForwardRow& row, std::int64_t stride, std::int64_t count,
                    std::int64_t heads, float rest, const Operands<Bf16Pair>& to) {
  constexpr float kLarge = 1024;
  const FloatTag d;
  bool has_rest = false;
  for (std::int64_t i = 0; i < heads; i += kLanes) {
    const auto largest_logit = hn::Mul(hn::LoadU(d, row.shift + i), hn::Set(d, rest));
    const auto is_large = hn::Gt(hn::Abs(largest_logit), hn::Set(d, kLarge));
    const auto lost_of = [&](FloatVector p) HWY_ATTR {
      return hn::Sub(p, widen_bits(d, narrow_bits(d, p, BFloat16{}), BFloat16{}));
    };
    has_rest |= !hn::AllFalse(d, is_large);
    auto lost_sum = hn::Zero(d);
    for (std::int64_t j = 0; j < count; j += 2) {
      const float* const from = row.scores + j * stride + i;
      const std::int64_t at = j / 2 * stride + i;
      const auto first = hn::LoadU(d, from);
      const auto second = j + 1 < count ? hn::LoadU(d, from + stride) : hn::Zero(d);
      const auto lost_first = lost_of(first);
      const auto lost_second = lost_of(second);
      store_pairs(first, second, to.p + at);
      store_pairs(hn::IfThenElseZero(is_large, lost_first),
                  hn::IfThenElseZero(is_large, lost_second), to.p_rest + at);
      lost_sum = hn::Add(lost_sum, hn::Add(lost_first, lost_second));
    }
    lost_sum = hn::IfThenZeroElse(is_large, lost_sum);
    hn::StoreU(hn::Add(hn::LoadU(d, row.lost_sum + i), lost_sum), d, row.lost_sum + i);
  }
  return has_rest;
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
    // The factor that makes p of exp(logit) is exp(-shift).
    const double shift = has_keys ? double{scale.rest} * row.shift[i] - row.log_factor : 0.0;
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
    // p, rounded, adds up to less or more than its sum, and so does out if it is not divided by it.
    const double share = is_zero ? 1.0 : sum / (sum - row.lost_sum[i]);
    const float factor = is_zero ? 1.0f : static_cast<float>(share / (sum + sink_exp));
    narrow_row(args.out.dtype, accumulator, factor, row_of(args.out, t, h), v_dim);
  }
}

/// Loads q^T if it is not there. No keys may have been gathered yet: they serve as scratch.
template <class Element>
void load_q(const SparseAttentionForward& args, std::int64_t t, HeadRange heads,
            Operands<Element>& to) {
  if (to.has_q) return;
  transpose_rows(slice(args.q, t), heads.begin, heads.count, to.q, padded_stride(heads.count),
                 to.keys);
  to.has_q = true;
}

/// Adds a block of keys to the accumulator. Returns false, and has changed nothing, if denormals
/// could occur in products of pairs.
template <class Element>
bool attend_block(const SparseAttentionForward& args, std::int64_t t, HeadRange heads,
                  const ForwardRow& row, Operands<Element>& of, std::int64_t count, bool is_first) {
  const std::int64_t v_dim = args.out.shape[2];
  const std::int64_t head_stride = padded_stride(heads.count);
  const std::int64_t key_stride = padded_stride(of.depth);
  const std::int64_t accumulator_stride = padded_stride(v_dim);
  const LogitScale scale(args.scale);
  load_q(args, t, heads, of);
  gather_rows(args.kv, row.key_rows, count, of.keys, key_stride);
  if constexpr (of.kArePairs) {
    const float least_key = least_magnitude(of.keys, key_stride, count, of.depth);
    // The first condition is for p times values: it loses nothing but where p is below 2^-56.
    if (least_key < kLeastMagnitude || !have_normal_products(of.least_q, least_key)) return false;
    interleave_packed(of.keys, key_stride, count, v_dim, of.values, of.value_stride);
  }
  multiply_blocked(KMajor<Element>{of.keys, key_stride}, count, of.q, head_stride, heads.count,
                   of.depth, row.scores, head_stride);
  bool has_new_shift = false;
  for (std::int64_t i = 0; i < heads.count; i += kLanes) {
    has_new_shift |= exponentiate(row, i, head_stride, count, scale);
  }
  for (std::int64_t i = 0; has_new_shift && !is_first && i < heads.count; ++i) {
    if (row.rescale[i] != 1)
      scale_row(row.accumulator + i * accumulator_stride, row.rescale[i], v_dim);
  }
  const auto add_values = [&](const Element* p, bool accumulate) {
    multiply_blocked(MnMajor<Element>{p, head_stride}, heads.count, of.values, of.value_stride,
                     v_dim, elements_of<Element>(count), row.accumulator, accumulator_stride,
                     accumulate);
  };
  if constexpr (of.kArePairs) {
    const bool has_rest = round_p(row, head_stride, count, heads.count, scale.rest, of);
    add_values(of.p, !is_first);
    if (has_rest) add_values(of.p_rest, true);
  } else {
    add_values(row.scores, !is_first);
  }
  return true;
}

/// Computes the sums of query row t for a range of heads. Returns whether it has keys.
bool attend_keys(const SparseAttentionForward& args, bool with_pairs, std::int64_t t,
                 HeadRange heads, const ForwardRow& row, Scratch scratch) {
  const AttentionSizes n = attention_sizes(args);
  Operands<float> floats(n, heads.count, scratch);
  std::optional<Operands<Bf16Pair>> pairs;
  if constexpr (kMultipliesPairs) {
    if (with_pairs) {
      pairs.emplace(n, heads.count, scratch);
      load_q(args, t, heads, *pairs);
      pairs->least_q = least_magnitude(pairs->q, padded_stride(heads.count), pairs->depth,
                                       padded_columns(heads.count));
      with_pairs = have_normal_products(pairs->least_q, 1);
    }
  }

  ValidKeys keys(args.indices, args.lengths, n.keys, t);
  std::int64_t count = keys.take(kBlockKeys, row.key_rows);
  const bool has_keys = count > 0;
  if (has_keys) {
    constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
    std::fill_n(row.max_score, padded_columns(heads.count), kMinusInfinity);
    std::fill_n(row.shift, padded_columns(heads.count), kMinusInfinity);
    std::fill_n(row.exp_sum, padded_columns(heads.count), 0.0f);
    std::fill_n(row.lost_sum, padded_columns(heads.count), 0.0f);
  }
  for (bool is_first = true; count > 0; is_first = false) {
    bool is_done = false;
    if constexpr (kMultipliesPairs)
      is_done = with_pairs && attend_block(args, t, heads, row, *pairs, count, is_first);
    if (!is_done) {
      floats.has_q = floats.has_q && !with_pairs;  // pairs have been where it was
      attend_block(args, t, heads, row, floats, count, is_first);
      if (with_pairs) pairs->has_q = false;
    }
    count = keys.take(kBlockKeys, row.key_rows);
  }
  return has_keys;
}

/// Whether the accumulator of a head has overflowed, or has got an infinity or NaN from values.
bool has_overflowed(const ForwardRow& row, std::int64_t heads, std::int64_t v_dim) {
  const FloatTag d;
  const auto largest = hn::Set(d, std::numeric_limits<float>::max());
  for (std::int64_t i = 0; i < heads; ++i) {
    if (!std::isfinite(row.exp_sum[i])) continue;
    const float* const accumulator = row.accumulator + i * padded_stride(v_dim);
    auto is_finite = hn::Eq(largest, largest);
    for (std::int64_t c = 0; c < v_dim; c += kLanes)
      is_finite = hn::And(is_finite, hn::Le(hn::Abs(hn::LoadU(d, accumulator + c)), largest));
    if (!hn::AllTrue(d, is_finite)) return true;
  }
  return false;
}

/// Computes the outputs of query row t for a range of heads.
void attend(const SparseAttentionForward& args, bool with_pairs, std::int64_t t, HeadRange heads,
            Scratch scratch) {
  const AttentionSizes n = attention_sizes(args);
  ForwardRow row(n, heads.count, scratch);
  bool has_keys = attend_keys(args, with_pairs, t, heads, row, scratch);
  if (has_keys && has_overflowed(row, heads.count, n.v_dim)) {
    // p may be e^16, and there may be 2^31 keys: times 2^-56 the sum stays below 1.
    row.log_factor = -38.816242f;
    has_keys = attend_keys(args, false, t, heads, row, scratch);
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

HeadGroups groups_of(const AttentionSizes& n) { return {n.heads, n.qk_dim, kGroupHeads}; }

std::size_t lane_bytes(const SparseAttentionForward& args) {
  const AttentionSizes n = attention_sizes(args);
  const std::int64_t heads = groups_of(n).max_size();
  const std::size_t pairs = may_have_pairs(args) ? Operands<Bf16Pair>::bytes(n, heads) : 0;
  return ForwardRow::bytes(n, heads) + std::max(Operands<float>::bytes(n, heads), pairs);
}

void run_rows(const SparseAttentionForward& args, bool with_pairs, const Execution& execution) {
  const AttentionSizes n = attention_sizes(args);
  const HeadGroups groups = groups_of(n);
  const auto attend_on_target = HWY_DYNAMIC_DISPATCH(attend);
  parallel_for(
      execution, n.tokens * groups.count(), lane_bytes(args), [&](std::int64_t i, Scratch scratch) {
        attend_on_target(args, with_pairs, i / groups.count(), groups[i % groups.count()], scratch);
      });
}

}  // namespace

std::string why_not(const SparseAttentionForward& args, const Execution& execution) {
  if (args.q.dtype == DType::f64) return refusal::no_f64;
  return over_limit(lane_bytes(args), execution);
}
std::string why_not_pairs(const SparseAttentionForward& args) {
  return why_not_pairs_of(args.q.dtype);
}
std::size_t workspace_bytes(const SparseAttentionForward& args, const Execution& execution) {
  return all_lanes_bytes(execution, lane_bytes(args));
}
void run(const SparseAttentionForward& args, const Execution& execution) {
  run_rows(args, false, execution);
}
void run_pairs(const SparseAttentionForward& args, const Execution& execution) {
  run_rows(args, true, execution);
}

}  // namespace winnow::cpu
#endif
