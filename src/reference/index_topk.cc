// SPDX-License-Identifier: Apache-2.0
// The indexer: scores, exact top-k selection, replay of given indices, gradients.
#include <algorithm>
#include <cmath>

#include "backend_operators.h"
#include "core/check.h"
#include "core/numerics.h"
#include "core/rows.h"
#include "core/threads.h"
#include "reference/index_scores.h"
#include "reference/key_gradients.h"
#include "reference/slots.h"
#include "reference/softmax.h"

namespace winnow::reference {
namespace {

struct Candidate {
  double score;
  std::int32_t key;
};

bool better(const Candidate& a, const Candidate& b) {
  return selected_before(a.score, a.key, b.score, b.key);
}

/// Keeps the `topk` best of the candidates added, in a buffer of twice that size.
class Selection {
 public:
  static std::int64_t capacity(std::int64_t keys, std::int64_t topk) {
    return std::min(keys, 2 * topk);
  }

  Selection(std::span<Candidate> memory, std::int64_t topk)
      : memory_(memory),
        topk_(std::min<std::int64_t>(topk, static_cast<std::int64_t>(memory.size()))) {}

  void add(Candidate candidate) {
    if (count_ == static_cast<std::int64_t>(memory_.size())) prune();
    memory_[count_++] = candidate;
  }
  std::span<Candidate> finish(SlotOrder order) {
    prune();
    const std::span<Candidate> selected = memory_.first(static_cast<std::size_t>(count_));
    if (order == SlotOrder::by_score) {
      std::sort(selected.begin(), selected.end(), better);
    } else {
      std::sort(selected.begin(), selected.end(),
                [](const auto& a, const auto& b) { return a.key < b.key; });
    }
    return selected;
  }

 private:
  void prune() {
    if (count_ <= topk_) return;
    std::nth_element(memory_.begin(), memory_.begin() + topk_, memory_.begin() + count_, better);
    count_ = topk_;
  }
  std::span<Candidate> memory_;
  std::int64_t topk_;
  std::int64_t count_ = 0;
};

/// Rounds to the type of the scores, since selection must compare the values that are returned.
double rounded(double score, DType dtype) {
  return dtype == DType::f64 ? score : static_cast<double>(static_cast<float>(score));
}

void select(const IndexTopkForward& args, const Execution& execution) {
  const std::int64_t topk = args.indices.shape[1];
  const Windows windows(args.begin, args.end);
  const View<std::int32_t, 2> indices(args.indices);
  const View<std::int32_t, 1> lengths(args.lengths);
  parallel_for(execution, args.q.shape[0], scratch_bytes(args, execution),
               [&](std::int64_t t, Scratch scratch) {
                 IndexRow index(args.q, args.k, args.weights, args.k_scale, scratch);
                 index.load(t);
                 Selection selection(
                     scratch.take<Candidate>(Selection::capacity(args.k.shape[0], topk)), topk);
                 for (std::int64_t s = windows.begin(t); s < windows.end(t); ++s) {
                   index.load_key(s);
                   const double score = rounded(index.score(), args.weights.dtype);
                   if (!std::isnan(score) && score != kMinusInfinity)
                     selection.add({score, static_cast<std::int32_t>(s)});
                 }
                 const std::span<Candidate> selected = selection.finish(args.order);
                 const auto length = static_cast<std::int64_t>(selected.size());
                 for (std::int64_t j = 0; j < topk; ++j) {
                   indices(t, j) = j < length ? selected[j].key : -1;
                   if (args.scores)
                     write(args.scores, {t, j}, j < length ? selected[j].score : kMinusInfinity);
                 }
                 if (lengths) lengths(t) = static_cast<std::int32_t>(length);
               });
}

void replay(const IndexTopkForward& args, const Execution& execution) {
  const Slots slots(args.indices, args.lengths, args.k.shape[0]);
  const Windows windows(args.begin, args.end);
  parallel_for(execution, args.q.shape[0], scratch_bytes(args, execution),
               [&](std::int64_t t, Scratch scratch) {
                 IndexRow index(args.q, args.k, args.weights, args.k_scale, scratch);
                 index.load(t);
                 for (std::int64_t j = 0; j < args.indices.shape[1]; ++j) {
                   const std::int64_t key = slots.key(t, j);
                   double score = kMinusInfinity;
                   if (windows.contain(t, key)) {
                     index.load_key(key);
                     score = index.score();
                   }
                   write(args.scores, {t, j}, score);
                 }
               });
}

const Tensor kNoScale;

}  // namespace

std::size_t scratch_bytes(const IndexTopkForward& args, const Execution&) {
  const std::int64_t candidates =
      args.replay ? 0 : Selection::capacity(args.k.shape[0], args.indices.shape[1]);
  return IndexRow::bytes(args.q) + Scratch::bytes<Candidate>(candidates);
}

void run(const IndexTopkForward& args, const Execution& execution) {
  if (args.replay) {
    replay(args, execution);
  } else {
    select(args, execution);
  }
}

std::size_t scratch_bytes(const IndexTopkBackward& args, const Execution& execution) {
  const std::int64_t heads = args.q.shape[1];
  const std::size_t query_bytes = IndexRow::bytes(args.q) +
                                  Scratch::bytes<double>(heads * args.q.shape[2]) +
                                  Scratch::bytes<double>(heads);
  return std::max(query_bytes,
                  key_gradient_scratch_bytes(args.d_k, IndexRow::bytes(args.q), execution));
}

void run(const IndexTopkBackward& args, const Execution& execution) {
  const std::int64_t tokens = args.q.shape[0];
  const std::int64_t heads = args.q.shape[1];
  const std::int64_t dim = args.q.shape[2];
  const Slots slots(args.indices, args.lengths, args.k.shape[0]);
  const Windows windows(args.begin, args.end);

  parallel_for(execution, tokens, scratch_bytes(args, execution),
               [&](std::int64_t t, Scratch scratch) {
                 IndexRow index(args.q, args.k, args.weights, kNoScale, scratch);
                 const std::span<double> d_q = scratch.take<double>(heads * dim);
                 const std::span<double> d_weights = scratch.take<double>(heads);
                 std::fill(d_q.begin(), d_q.end(), 0.0);
                 std::fill(d_weights.begin(), d_weights.end(), 0.0);
                 index.load(t);
                 for (std::int64_t j = 0; j < slots.count(t); ++j) {
                   const std::int64_t key = slots.key(t, j);
                   if (!windows.contain(t, key)) continue;
                   index.load_key(key);
                   index.add_query_gradient(read(args.d_scores, {t, j}), d_q, d_weights);
                 }
                 for (std::int64_t h = 0; h < heads; ++h)
                   write_row(args.d_q, {t, h}, row(d_q, h, dim));
                 write_row(args.d_weights, {t}, d_weights);
               });

  sum_key_gradients(args.d_k, accumulation_type(args.q.dtype), IndexRow::bytes(args.q), execution,
                    [&](const KeySums& d_k, Scratch scratch) {
                      IndexRow index(args.q, args.k, args.weights, kNoScale, scratch);
                      for (std::int64_t t = 0; t < tokens; ++t) {
                        index.load(t);
                        for (std::int64_t j = 0; j < slots.count(t); ++j) {
                          const std::int64_t key = slots.key(t, j);
                          if (!windows.contain(t, key) || !d_k.contain(key)) continue;
                          index.load_key(key);
                          index.add_key_gradient(read(args.d_scores, {t, j}), d_k.of(key));
                        }
                      }
                    });
}

}  // namespace winnow::reference
