// SPDX-License-Identifier: Apache-2.0
// The indexer's warm-up loss: its scores against dense attention over the window of each query row.
//
// A task is one query row and goes through its window in blocks of keys. The attention logits are
// computed once if lse is given or if those of a whole window fit into the workspace, else
// recomputed once lse is known. Backward turns the windows of a chunk of rows into index lists with
// d_scores, for which index_gradient computes the gradients.
//
// Kernel `simd` multiplies floats. Kernel `avx512_bf16` multiplies pairs of bf16, but floats for a
// row and a block of keys whose products could be denormal.
#include <algorithm>
#include <cmath>
#include <limits>
#include <span>

#include "backend_operators.h"
#include "core/refusals.h"
#include "core/threads.h"
#include "core/view.h"
#include "cpu/bf16_pairs.h"
#include "cpu/index_gradient.h"
#include "cpu/plan.h"
#include "cpu/simd.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/dense_index_loss.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "cpu/attention_logits-inl.h"
#include "cpu/divergence-inl.h"
#include "cpu/exp-inl.h"
#include "cpu/widen-inl.h"

#ifndef WINNOW_CPU_DENSE_INDEX_LOSS_CC_
#define WINNOW_CPU_DENSE_INDEX_LOSS_CC_
namespace winnow::cpu {

/// Sizes of the task of one query row.
struct DenseRowPlan {
  RowProductsPlan attention, index;
  std::int64_t keys;  // upper bound of the window length

  template <class Args>
  DenseRowPlan(const Args& args, bool with_pairs, std::int64_t kept_keys)
      : attention(args.q, kept_keys), index(args.index_q), keys(args.index_k.shape[0]) {
    attention.with_pairs = index.with_pairs = with_pairs;
  }

  std::size_t bytes() const {
    return attention.bytes() + index.bytes() + 3 * Scratch::bytes<float>(keys) +
           Scratch::bytes<float>(attention.head_stride) +
           Scratch::bytes<double>(attention.head_stride);
  }
};

/// Keeps the products of whole windows from lse to target if half of the workspace limit has room
/// for them on every lane.
inline DenseRowPlan plan_dense_row(const DenseIndexLossForward& args, bool with_pairs,
                                   const Execution& execution) {
  const DenseRowPlan keeps_none(args, with_pairs, 0);
  if (args.lse_given) return keeps_none;
  const DenseRowPlan keeps_all(args, with_pairs, args.index_k.shape[0]);
  const std::size_t bytes = keeps_all.bytes() * static_cast<std::size_t>(thread_count(execution));
  return bytes <= execution.workspace_limit / 2 ? keeps_all : keeps_none;
}

}  // namespace winnow::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace winnow::cpu::HWY_NAMESPACE {

/// Online log-sum-exp of every head: fp32 within a block of keys, double across blocks.
class OnlineLogSumExp {
 public:
  OnlineLogSumExp(const RowProductsPlan& plan, Scratch& scratch)
      : heads_(plan.heads),
        max_(scratch.take<float>(plan.head_stride)),
        exp_sums_(scratch.take<double>(plan.head_stride)) {
    std::fill(max_.begin(), max_.end(), -std::numeric_limits<float>::infinity());
    std::fill(exp_sums_.begin(), exp_sums_.end(), 0.0);
  }

  void add(const RowProducts& products, std::int64_t first, std::int64_t count, float scale) {
    const FloatTag d;
    const auto factor = hn::Set(d, scale);
    for (std::int64_t h = 0; h < heads_; h += kLanes) {
      const auto old_max = hn::LoadU(d, max_.data() + h);
      auto new_max = old_max;
      for (std::int64_t i = 0; i < count; ++i) {
        const auto logit = hn::Mul(factor, products.at(first + i, h));
        new_max = hn::IfThenElse(hn::Gt(logit, new_max), logit, new_max);
      }
      const auto base = finite_or_zero(new_max);
      auto sum = hn::Zero(d);
      for (std::int64_t i = 0; i < count; ++i)
        sum = hn::Add(sum, exp(d, hn::Sub(hn::Mul(factor, products.at(first + i, h)), base)));
      HWY_ALIGN float added[kLanes], rescale[kLanes];
      hn::Store(sum, d, added);
      hn::Store(exp(d, hn::Sub(finite_or_zero(old_max), base)), d, rescale);
      for (std::int64_t i = 0; i < kLanes; ++i) {
        // With an old maximum of -inf the sum is still 0, and rescale[i] must not be used.
        const double kept = exp_sums_[h + i] == 0 ? 0 : exp_sums_[h + i] * rescale[i];
        exp_sums_[h + i] = kept + added[i];
      }
      hn::StoreU(new_max, d, max_.data() + h);
    }
  }
  float lse(std::int64_t h) const {
    if (std::isinf(max_[h])) return max_[h];
    return static_cast<float>(max_[h] + std::log(exp_sums_[h]));
  }

 private:
  static HWY_INLINE FloatVector finite_or_zero(FloatVector x) {
    const FloatTag d;
    const auto infinity = hn::Set(d, std::numeric_limits<float>::infinity());
    return hn::IfThenZeroElse(hn::Eq(hn::Abs(x), infinity), x);
  }
  std::int64_t heads_;
  std::span<float> max_;
  std::span<double> exp_sums_;
};

/// One query row over its window: the scores of the indexer and the target from dense attention.
template <class Args>
class DenseRow {
 public:
  DenseRow(const Args& args, const DenseRowPlan& plan, std::int64_t t, Scratch& scratch)
      : args_(args),
        t_(t),
        begin_(View<const std::int32_t, 1>(args.begin)(t)),
        size_(View<const std::int32_t, 1>(args.end)(t) - begin_),
        keeps_products_(size_ <= plan.attention.kept_keys),
        attention_(plan.attention, scratch),
        index_(plan.index, scratch),
        scores_(scratch.take<float>(plan.keys)),
        target_(scratch.take<float>(plan.keys)) {
    attention_.load(args.q, t);
    index_.load(args.index_q, t);
    std::fill(index_.per_head.begin(), index_.per_head.end(), 0.0f);
    widen_row(DType::f32, row_of(args.weights, t), index_.per_head.data(), index_.heads());
  }
  std::int64_t begin() const { return begin_; }
  std::int64_t size() const { return size_; }

  void compute_lse(float* lse, Scratch& scratch) {
    OnlineLogSumExp sums(attention_.plan(), scratch);
    for_blocks([&](std::int64_t first, std::int64_t count) {
      sums.add(attention_, multiply(first, count), count, args_.scale);
    });
    for (std::int64_t h = 0; h < attention_.heads(); ++h) lse[h] = sums.lse(h);
    has_products_ = keeps_products_;
  }

  /// Returns the KL divergence of the row, given lse, and writes its gradient for every key.
  float divergence_and_gradient(float* d_scores) {
    load_log_sums(args_.lse, args_.sink, t_, attention_);
    for_blocks([&](std::int64_t first, std::int64_t count) {
      const std::int64_t first_kept = has_products_ ? first : multiply(first, count);
      index_.multiply_range(args_.index_k, begin_ + first, count, 0);
      for (std::int64_t i = 0; i < count; ++i) {
        target_[first + i] = target_of_key(attention_, first_kept + i, args_.scale);
        scores_[first + i] = score_of_key(index_, i);
      }
    });
    return divergence(scores_.first(static_cast<std::size_t>(size_)), target_.data(), d_scores);
  }

 private:
  template <class Use>
  void for_blocks(const Use& use) {
    for (std::int64_t first = 0; first < size_; first += kKeyBlock)
      use(first, std::min(kKeyBlock, size_ - first));
  }
  /// Multiplies q with keys of the window; returns the index of the first kept product.
  std::int64_t multiply(std::int64_t first, std::int64_t count) {
    const std::int64_t first_kept = keeps_products_ ? first : 0;
    attention_.multiply_range(args_.kv, args_.key_offset + begin_ + first, count, first_kept);
    return first_kept;
  }

  const Args& args_;
  std::int64_t t_, begin_, size_;
  bool keeps_products_;
  bool has_products_ = false;
  RowProducts attention_, index_;
  std::span<float> scores_, target_;
};

void dense_forward_row(const DenseIndexLossForward& args, const DenseRowPlan& plan, std::int64_t t,
                       Scratch scratch) {
  DenseRow row(args, plan, t, scratch);
  const std::span<float> d_scores = scratch.take<float>(plan.keys);
  if (!args.lse_given) row.compute_lse(static_cast<float*>(row_of(args.lse, t)), scratch);
  View<float, 1>(args.loss)(t) = row.divergence_and_gradient(d_scores.data());
}

/// Writes row t as an index list with d_scores and its length. A key whose gradient is 0 gets the
/// index -1, so that a NaN in d_loss does not reach a row without loss.
void dense_gradient_row(const DenseIndexLossBackward& args, const DenseRowPlan& plan,
                        std::int64_t t, std::int32_t* indices, float* d_scores,
                        std::int32_t* length, Scratch scratch) {
  DenseRow row(args, plan, t, scratch);
  row.divergence_and_gradient(d_scores);
  const float d_loss = View<const float, 1>(args.d_loss)(t);
  for (std::int64_t i = 0; i < row.size(); ++i) {
    indices[i] = d_scores[i] != 0 ? static_cast<std::int32_t>(row.begin() + i) : -1;
    d_scores[i] *= d_loss;
  }
  *length = static_cast<std::int32_t>(row.size());
}

}  // namespace winnow::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace winnow::cpu {
namespace {

/// Backward works on a chunk of query rows at a time.
struct DenseBackwardPlan {
  bool with_pairs;
  std::int64_t width;     // slots of an index list
  std::int64_t rows = 1;  // in a chunk
  DenseRowPlan row;
  std::size_t min_bytes;  // the smallest workspace limit that suffices

  DenseBackwardPlan(const DenseIndexLossBackward& args, bool with_pairs,
                    const Execution& execution);

  std::size_t row_bytes() const {
    return Scratch::bytes<std::int32_t>(width) + Scratch::bytes<float>(width) +
           Scratch::bytes<std::int32_t>(1);
  }
  std::size_t list_bytes() const { return static_cast<std::size_t>(rows) * row_bytes(); }
};

/// The arguments of index_gradient for one chunk of rows, with the index lists in the workspace.
IndexTopkBackward chunk_of(const DenseIndexLossBackward& args, const DenseBackwardPlan& plan,
                           const Tensor& d_index_k, std::int64_t first, std::int64_t rows,
                           Scratch lists) {
  const auto rows_of = [&](const Tensor& tensor) {
    Tensor part = from_row(tensor, first);
    part.shape[0] = rows;
    return part;
  };
  const auto list = [&](auto memory, DType dtype) {
    return tensor(memory.data(), dtype, {rows, plan.width});
  };
  IndexTopkBackward chunk;
  chunk.q = rows_of(args.index_q);
  chunk.k = args.index_k;
  chunk.weights = rows_of(args.weights);
  chunk.begin = rows_of(args.begin);
  chunk.end = rows_of(args.end);
  chunk.indices = list(lists.take<std::int32_t>(plan.rows * plan.width), DType::i32);
  chunk.d_scores = list(lists.take<float>(plan.rows * plan.width), DType::f32);
  chunk.lengths = tensor(lists.take<std::int32_t>(plan.rows).data(), DType::i32, {rows});
  chunk.d_q = rows_of(args.d_index_q);
  chunk.d_weights = rows_of(args.d_weights);
  chunk.d_k = d_index_k;
  return chunk;
}

/// The workspace that remains for the lanes, or for index_gradient, after the lists.
Execution after_lists(Execution execution, const DenseBackwardPlan& plan) {
  const std::size_t bytes = plan.list_bytes();
  execution.workspace_limit -= std::min(execution.workspace_limit, bytes);
  if (execution.workspace != nullptr) {
    execution.workspace = static_cast<std::byte*>(execution.workspace) + bytes;
    execution.workspace_bytes -= bytes;
  }
  return execution;
}

IndexGradientPlan gradient_plan(const DenseIndexLossBackward& args, const DenseBackwardPlan& plan,
                                const Execution& rest) {
  return IndexGradientPlan(
      chunk_of(args, plan, args.d_index_k, 0, std::min(plan.rows, args.q.shape[0]),
               Scratch(nullptr, plan.list_bytes())),
      plan.with_pairs, rest);
}

DenseBackwardPlan::DenseBackwardPlan(const DenseIndexLossBackward& args, bool with_pairs,
                                     const Execution& execution)
    : with_pairs(with_pairs),
      width(std::max<std::int64_t>(args.index_k.shape[0], 1)),
      row(args, with_pairs, 0) {
  const std::size_t others = std::max(row.bytes(), gradient_plan(args, *this, execution).min_bytes);
  min_bytes = row_bytes() + others;
  const std::size_t limit = execution.workspace_limit;
  const std::size_t for_lists = std::min(limit / 4, limit - std::min(limit, others));
  rows = std::clamp<std::int64_t>(static_cast<std::int64_t>(for_lists / row_bytes()), 1,
                                  std::max<std::int64_t>(args.q.shape[0], 1));
}

}  // namespace

HWY_EXPORT(dense_forward_row);
HWY_EXPORT(dense_gradient_row);

namespace {

void run_rows(const DenseIndexLossForward& args, bool with_pairs, const Execution& execution) {
  const DenseRowPlan plan = plan_dense_row(args, with_pairs, execution);
  parallel_for(execution, args.q.shape[0], plan.bytes(), [&](std::int64_t t, Scratch scratch) {
    HWY_DYNAMIC_DISPATCH(dense_forward_row)(args, plan, t, scratch);
  });
}

void run_chunks(const DenseIndexLossBackward& args, bool with_pairs, const Execution& execution) {
  const DenseBackwardPlan plan(args, with_pairs, execution);
  const KeySums d_index_k(args.d_index_k, execution);
  const Execution rest = after_lists(d_index_k.rest, plan);
  const IndexGradientPlan gradient = gradient_plan(args, plan, rest);
  const std::int64_t tokens = args.q.shape[0];
  for (std::int64_t first = 0; first < tokens; first += plan.rows) {
    const std::int64_t rows = std::min(plan.rows, tokens - first);
    const IndexTopkBackward chunk =
        chunk_of(args, plan, d_index_k.sums, first, rows,
                 Scratch(static_cast<std::byte*>(d_index_k.rest.workspace), plan.list_bytes()));
    const View<std::int32_t, 2> indices(chunk.indices);
    const View<float, 2> d_scores(chunk.d_scores);
    const View<std::int32_t, 1> lengths(chunk.lengths);
    parallel_for(rest, rows, plan.row.bytes(), [&](std::int64_t i, Scratch scratch) {
      HWY_DYNAMIC_DISPATCH(dense_gradient_row)
      (args, plan.row, first + i, &indices(i, 0), &d_scores(i, 0), &lengths(i), scratch);
    });
    index_gradient(chunk, gradient, rest);
  }
  d_index_k.finish();
}

}  // namespace

std::string why_not(const DenseIndexLossForward& args, const Execution& execution) {
  if (args.q.dtype == DType::f64) return refusal::no_f64;
  return over_limit(DenseRowPlan(args, false, 0).bytes(), execution);
}
std::string why_not_pairs(const DenseIndexLossForward& args) {
  return why_not_pairs_of(args.q.dtype);
}

std::size_t workspace_bytes(const DenseIndexLossForward& args, const Execution& execution) {
  return all_lanes_bytes(execution, plan_dense_row(args, false, execution).bytes());
}

void run(const DenseIndexLossForward& args, const Execution& execution) {
  run_rows(args, false, execution);
}
void run_pairs(const DenseIndexLossForward& args, const Execution& execution) {
  run_rows(args, true, execution);
}

std::string why_not(const DenseIndexLossBackward& args, const Execution& execution) {
  if (args.q.dtype == DType::f64) return refusal::no_f64;
  return over_limit(DenseBackwardPlan(args, false, execution).min_bytes, execution);
}
std::string why_not_pairs(const DenseIndexLossBackward& args) {
  return why_not_pairs_of(args.q.dtype);
}

std::size_t workspace_bytes(const DenseIndexLossBackward& args, const Execution& execution) {
  const DenseBackwardPlan plan(args, false, execution);
  const Execution rest = after_lists(execution, plan);
  return KeySums::bytes(args.d_index_k) + plan.list_bytes() +
         std::max(all_lanes_bytes(rest, plan.row.bytes()), gradient_plan(args, plan, rest).bytes);
}

void run(const DenseIndexLossBackward& args, const Execution& execution) {
  run_chunks(args, false, execution);
}
void run_pairs(const DenseIndexLossBackward& args, const Execution& execution) {
  run_chunks(args, true, execution);
}

}  // namespace winnow::cpu
#endif
