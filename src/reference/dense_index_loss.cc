// SPDX-License-Identifier: Apache-2.0
// The indexer's warm-up loss: its scores against dense attention over the window of each query row,
// one row per task.
#include <algorithm>

#include "backend_operators.h"
#include "core/check.h"
#include "core/rows.h"
#include "core/threads.h"
#include "reference/divergence.h"
#include "reference/index_scores.h"
#include "reference/key_gradients.h"
#include "reference/linear.h"
#include "reference/slots.h"
#include "reference/softmax.h"

namespace winnow::reference {
namespace {

const Tensor kNoScale;

/// One query row over its window: the scores of the indexer and the target from dense attention.
template <class Args>
class DenseRow {
 public:
  static std::size_t bytes(const Args& args) {
    const std::int64_t heads = args.q.shape[1];
    return IndexRow::bytes(args.index_q) + Scratch::bytes<double>(heads * args.q.shape[2]) +
           Scratch::bytes<double>(heads) + Scratch::bytes<double>(args.q.shape[2]) +
           3 * Scratch::bytes<double>(args.index_k.shape[0]);
  }

  DenseRow(const Args& args, Scratch& scratch)
      : args_(args),
        windows_(args.begin, args.end),
        heads_(args.q.shape[1]),
        dim_(args.q.shape[2]),
        index_(args.index_q, args.index_k, args.weights, kNoScale, scratch),
        q_(scratch.take<double>(heads_ * dim_)),
        lse_(scratch.take<double>(heads_)),
        key_(scratch.take<double>(dim_)),
        scores_(scratch.take<double>(args.index_k.shape[0])),
        target_(scratch.take<double>(args.index_k.shape[0])),
        d_scores_(scratch.take<double>(args.index_k.shape[0])) {}

  void load(std::int64_t t) {
    begin_ = windows_.begin(t);
    size_ = static_cast<std::size_t>(windows_.end(t) - begin_);
    index_.load(t);
    for (std::int64_t h = 0; h < heads_; ++h) read_row(args_.q, {t, h}, row(q_, h, dim_));
  }
  std::int64_t begin() const { return begin_; }
  std::int64_t end() const { return begin_ + static_cast<std::int64_t>(size_); }
  IndexRow& index() { return index_; }

  /// log-sum-exp of the attention logits over the window, for each head.
  std::span<const double> compute_lse() {
    std::fill(lse_.begin(), lse_.end(), kMinusInfinity);
    for (std::int64_t s = begin_; s < end(); ++s) {
      load_key(s);
      for (std::int64_t h = 0; h < heads_; ++h) lse_[h] = log_add_exp(lse_[h], logit(h));
    }
    return lse_;
  }

  /// Returns the KL divergence of the row, given lse(), and keeps its gradient for d_score().
  double divergence_and_gradient() {
    for (std::size_t i = 0; i < size_; ++i) {
      const std::int64_t s = begin_ + static_cast<std::int64_t>(i);
      index_.load_key(s);
      scores_[i] = index_.score();
      load_key(s);
      target_[i] = 0;
      for (std::int64_t h = 0; h < heads_; ++h) {
        const double sink = args_.sink ? read(args_.sink, {h}) : kMinusInfinity;
        target_[i] += probability(logit(h), log_add_exp(lse_[h], sink));
      }
    }
    return divergence(scores_.first(size_), target_.first(size_), d_scores_.first(size_));
  }
  std::span<double> lse() { return lse_; }
  double d_score(std::int64_t s) const { return d_scores_[static_cast<std::size_t>(s - begin_)]; }

 private:
  void load_key(std::int64_t s) { read_row(args_.kv, {args_.key_offset + s}, key_); }
  double logit(std::int64_t h) const { return args_.scale * dot(row(q_, h, dim_), key_); }

  const Args& args_;
  Windows windows_;
  std::int64_t heads_;
  std::int64_t dim_;
  std::int64_t begin_ = 0;
  std::size_t size_ = 0;
  IndexRow index_;
  std::span<double> q_, lse_, key_, scores_, target_, d_scores_;
};

using ForwardRow = DenseRow<DenseIndexLossForward>;
using BackwardRow = DenseRow<DenseIndexLossBackward>;

/// Recomputes the score gradients of row t from the lse that forward returned.
void load_gradient(const DenseIndexLossBackward& args, std::int64_t t, BackwardRow& dense) {
  dense.load(t);
  read_row(args.lse, {t}, dense.lse());
  dense.divergence_and_gradient();
}

}  // namespace

std::size_t scratch_bytes(const DenseIndexLossForward& args, const Execution&) {
  return ForwardRow::bytes(args);
}

void run(const DenseIndexLossForward& args, const Execution& execution) {
  parallel_for(execution, args.q.shape[0], scratch_bytes(args, execution),
               [&](std::int64_t t, Scratch scratch) {
                 ForwardRow dense(args, scratch);
                 dense.load(t);
                 if (args.lse_given) {
                   read_row(args.lse, {t}, dense.lse());
                 } else {
                   write_row(args.lse, {t}, dense.compute_lse());
                 }
                 write(args.loss, {t}, dense.divergence_and_gradient());
               });
}

std::size_t scratch_bytes(const DenseIndexLossBackward& args, const Execution& execution) {
  const std::int64_t heads = args.index_q.shape[1];
  const std::size_t row_bytes = BackwardRow::bytes(args);
  const std::size_t query_bytes = row_bytes +
                                  Scratch::bytes<double>(heads * args.index_q.shape[2]) +
                                  Scratch::bytes<double>(heads);
  return std::max(query_bytes, key_gradient_scratch_bytes(args.d_index_k, row_bytes, execution));
}

void run(const DenseIndexLossBackward& args, const Execution& execution) {
  const std::int64_t tokens = args.q.shape[0];
  const std::int64_t heads = args.index_q.shape[1];
  const std::int64_t dim = args.index_q.shape[2];

  parallel_for(execution, tokens, scratch_bytes(args, execution),
               [&](std::int64_t t, Scratch scratch) {
                 BackwardRow dense(args, scratch);
                 const std::span<double> d_q = scratch.take<double>(heads * dim);
                 const std::span<double> d_weights = scratch.take<double>(heads);
                 std::fill(d_q.begin(), d_q.end(), 0.0);
                 std::fill(d_weights.begin(), d_weights.end(), 0.0);
                 load_gradient(args, t, dense);
                 const double d_loss = read(args.d_loss, {t});
                 for (std::int64_t s = dense.begin(); s < dense.end(); ++s) {
                   if (dense.d_score(s) == 0)
                     continue;  // a NaN in d_loss must not reach a row without loss
                   dense.index().load_key(s);
                   dense.index().add_query_gradient(d_loss * dense.d_score(s), d_q, d_weights);
                 }
                 for (std::int64_t h = 0; h < heads; ++h)
                   write_row(args.d_index_q, {t, h}, row(d_q, h, dim));
                 write_row(args.d_weights, {t}, d_weights);
               });

  sum_key_gradients(args.d_index_k, accumulation_type(args.q.dtype), BackwardRow::bytes(args),
                    execution, [&](const KeySums& d_index_k, Scratch scratch) {
                      BackwardRow dense(args, scratch);
                      for (std::int64_t t = 0; t < tokens; ++t) {
                        load_gradient(args, t, dense);
                        const double d_loss = read(args.d_loss, {t});
                        for (std::int64_t s = dense.begin(); s < dense.end(); ++s) {
                          if (!d_index_k.contain(s) || dense.d_score(s) == 0) continue;
                          dense.index().load_key(s);
                          dense.index().add_key_gradient(d_loss * dense.d_score(s),
                                                         d_index_k.of(s));
                        }
                      }
                    });
}

}  // namespace winnow::reference
