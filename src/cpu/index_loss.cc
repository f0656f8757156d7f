// SPDX-License-Identifier: Apache-2.0
// The indexer's target, and its KL divergence from the scores over the selected slots.
//
// Of index_target kernel `simd` multiplies floats. Kernel `avx512_bf16` multiplies pairs of bf16,
// but floats for a row and a block of keys whose products could be denormal.
#include <algorithm>
#include <cmath>
#include <limits>
#include <span>

#include "backend_operators.h"
#include "core/refusals.h"
#include "core/threads.h"
#include "core/view.h"
#include "cpu/bf16_pairs.h"
#include "cpu/plan.h"
#include "cpu/simd.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/index_loss.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "cpu/attention_logits-inl.h"
#include "cpu/divergence-inl.h"
#include "cpu/widen-inl.h"

HWY_BEFORE_NAMESPACE();
namespace winnow::cpu::HWY_NAMESPACE {

/// Computes row t of index_target.
void target_row(const IndexTarget& args, const RowProductsPlan& plan, std::int64_t t,
                Scratch scratch) {
  const std::int64_t keys = args.kv.shape[0] - args.key_offset;
  const std::int64_t topk = args.indices.shape[1];
  const auto* const indices = static_cast<const std::int32_t*>(row_of(args.indices, t));
  auto* const target = static_cast<float*>(row_of(args.target, t));
  const std::int64_t length = args.lengths ? View<const std::int32_t, 1>(args.lengths)(t) : topk;
  const Tensor kv = from_row(args.kv, args.key_offset);
  RowProducts products(plan, scratch);
  products.load(args.q, t);
  load_log_sums(args.lse, args.sink, t, products);

  if (!args.accumulate) std::fill_n(target, topk, 0.0f);
  std::int32_t block_keys[kKeyBlock];
  std::int64_t slots[kKeyBlock];
  for (std::int64_t j = 0; j < length;) {
    std::int64_t count = 0;
    for (; j < length && count < kKeyBlock; ++j) {
      block_keys[count] = indices[j];
      slots[count] = j;
      count += indices[j] >= 0 && indices[j] < keys;
    }
    if (count == 0) continue;
    products.multiply_gathered(kv, block_keys, count);
    for (std::int64_t i = 0; i < count; ++i)
      target[slots[i]] += target_of_key(products, i, args.scale);
  }
}

/// Computes row t of index_loss, with -inf as the score of invalid slots.
void loss_row(const IndexLoss& args, std::int64_t t, Scratch scratch) {
  const std::int64_t topk = args.indices.shape[1];
  const std::span<float> scores = scratch.take<float>(topk);
  const auto* const indices = static_cast<const std::int32_t*>(row_of(args.indices, t));
  const auto* const given = static_cast<const float*>(row_of(args.scores, t));
  const std::int64_t length = args.lengths ? View<const std::int32_t, 1>(args.lengths)(t) : topk;
  constexpr float kNone = -std::numeric_limits<float>::infinity();
  for (std::int64_t j = 0; j < length; ++j) scores[j] = indices[j] >= 0 ? given[j] : kNone;
  std::fill(scores.begin() + length, scores.end(), kNone);
  View<float, 1>(args.loss)(t) =
      divergence(scores, static_cast<const float*>(row_of(args.target, t)),
                 static_cast<float*>(row_of(args.d_scores, t)));
}

}  // namespace winnow::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace winnow::cpu {

HWY_EXPORT(target_row);
HWY_EXPORT(loss_row);

namespace {

void run_rows(const IndexTarget& args, bool with_pairs, const Execution& execution) {
  RowProductsPlan plan(args.q);
  plan.with_pairs = with_pairs;
  parallel_for(execution, args.q.shape[0], plan.bytes(), [&](std::int64_t t, Scratch scratch) {
    HWY_DYNAMIC_DISPATCH(target_row)(args, plan, t, scratch);
  });
}

}  // namespace

std::string why_not(const IndexTarget& args, const Execution& execution) {
  if (args.q.dtype == DType::f64) return refusal::no_f64;
  return over_limit(RowProductsPlan(args.q).bytes(), execution);
}
std::string why_not_pairs(const IndexTarget& args) { return why_not_pairs_of(args.q.dtype); }

std::size_t workspace_bytes(const IndexTarget& args, const Execution& execution) {
  return all_lanes_bytes(execution, RowProductsPlan(args.q).bytes());
}

void run(const IndexTarget& args, const Execution& execution) { run_rows(args, false, execution); }
void run_pairs(const IndexTarget& args, const Execution& execution) {
  run_rows(args, true, execution);
}

std::string why_not(const IndexLoss& args, const Execution& execution) {
  if (args.scores.dtype == DType::f64) return refusal::no_f64;
  return over_limit(Scratch::bytes<float>(args.indices.shape[1]), execution);
}

std::size_t workspace_bytes(const IndexLoss& args, const Execution& execution) {
  return all_lanes_bytes(execution, Scratch::bytes<float>(args.indices.shape[1]));
}

void run(const IndexLoss& args, const Execution& execution) {
  parallel_for(execution, args.indices.shape[0], Scratch::bytes<float>(args.indices.shape[1]),
               [&](std::int64_t t, Scratch scratch) {
                 HWY_DYNAMIC_DISPATCH(loss_row)(args, t, scratch);
               });
}

}  // namespace winnow::cpu
#endif
