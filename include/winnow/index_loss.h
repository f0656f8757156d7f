// SPDX-License-Identifier: Apache-2.0
// index_target, index_loss, dense_index_loss: training the indexer to match the attention that uses
// its selection.
#pragma once

#include <tuple>

#include "winnow/call.h"

namespace winnow {

/// target[t,j] = sum_h p[t,h,j], with p of sparse_attention and the lse of that call; 0 in slots
/// without a key. Not normalised, so that tensor-parallel ranks can sum theirs first. The key of
/// slot j is kv[key_offset + indices[t,j]], if indices[t,j] >= 0 and j < lengths[t].
/// With `accumulate` it is added to what target holds, so that layers which share one selection sum
/// theirs and index_loss normalises once; slots without a key stay as they are.
struct IndexTarget {
  Tensor q{};                   // [tokens, heads, qk_dim]  bf16 | f16 | f32 | f64 (reference)
  Tensor kv{};                  // [keys, qk_dim]           as q
  Tensor indices{};             // [tokens, topk]           i32
  Tensor lengths{};             // [tokens]                 i32, optional
  Tensor sink{};                // [heads]                  f32 (f64 with f64), optional
  Tensor lse{};                 // [tokens, heads]          as sink
  Tensor target{};              // [tokens, topk]           as sink, out; added to, if accumulate
  float scale = 0;              // as given to sparse_attention; there is no default
  std::int32_t key_offset = 0;  // the row of kv at which the indexer's keys begin
  bool accumulate = false;

  static constexpr char kOperator[] = "index_target";
  static constexpr auto fields() {
    using Args = IndexTarget;
    return std::tuple{fields::input("q", &Args::q),
                      fields::input("kv", &Args::kv),
                      fields::input("indices", &Args::indices),
                      fields::input("lengths", &Args::lengths),
                      fields::input("sink", &Args::sink),
                      fields::input("lse", &Args::lse),
                      fields::output("target", &Args::target),
                      fields::option("scale", &Args::scale),
                      fields::option("key_offset", &Args::key_offset),
                      fields::option("accumulate", &Args::accumulate)};
  }
};

/// loss[t] = KL(target[t] / sum_j target[t,j]  ||  softmax(scores[t])) and its gradient, both over
/// the valid slots: index >= 0, below lengths, score not -inf.
///   d_scores = softmax(scores) - target / sum_j target
/// With fewer than two valid slots, or a target sum of 0, loss and gradient are 0.
struct IndexLoss {
  Tensor indices{};   // [tokens, topk]  i32
  Tensor lengths{};   // [tokens]        i32, optional
  Tensor scores{};    // [tokens, topk]  f32 | f64 (reference)
  Tensor target{};    // [tokens, topk]  as scores
  Tensor loss{};      // [tokens]        as scores, out
  Tensor d_scores{};  // [tokens, topk]  as scores, out; 0 in invalid slots

  static constexpr char kOperator[] = "index_loss";
  static constexpr auto fields() {
    using Args = IndexLoss;
    return std::tuple{
        fields::input("indices", &Args::indices), fields::input("lengths", &Args::lengths),
        fields::input("scores", &Args::scores),   fields::input("target", &Args::target),
        fields::output("loss", &Args::loss),      fields::output("d_scores", &Args::d_scores)};
  }
};

/// The loss of the warm-up stage: the same KL over the whole window of every row, between dense
/// attention over that window and the indexer's scores (as in index_topk). Key s of the indexer is
/// kv[key_offset + s]. With `lse_given`, lse is read: that of the attention which the model
/// computed over the window, or over keys that contain it. It is an input then, which may share
/// memory with others, and attention is multiplied once instead of twice.
struct DenseIndexLossForward {
  Tensor q{};        // [tokens, heads, qk_dim]           bf16 | f16 | f32 | f64 (reference)
  Tensor kv{};       // [keys, qk_dim]                    as q
  Tensor sink{};     // [heads]                           f32 (f64 with f64), optional
  Tensor index_q{};  // [tokens, index_heads, index_dim]  as q
  Tensor index_k{};  // [index_keys, index_dim]           as q
  Tensor weights{};  // [tokens, index_heads]             as sink
  Tensor begin{};    // [tokens]                          i32
  Tensor end{};      // [tokens]                          i32
  Tensor loss{};     // [tokens]                          as sink, out
  Tensor lse{};      // [tokens, heads]                   as sink, out: over the window, keys only;
                     //   in, if lse_given
  float scale = 0;   // there is no default
  std::int32_t key_offset = 0;
  bool lse_given = false;

  static constexpr char kOperator[] = "dense_index_loss_forward";
  static constexpr auto fields() {
    using Args = DenseIndexLossForward;
    return std::tuple{fields::input("q", &Args::q),
                      fields::input("kv", &Args::kv),
                      fields::input("sink", &Args::sink),
                      fields::input("index_q", &Args::index_q),
                      fields::input("index_k", &Args::index_k),
                      fields::input("weights", &Args::weights),
                      fields::input("begin", &Args::begin),
                      fields::input("end", &Args::end),
                      fields::output("loss", &Args::loss),
                      fields::output("lse", &Args::lse),
                      fields::option("scale", &Args::scale),
                      fields::option("key_offset", &Args::key_offset),
                      fields::option("lse_given", &Args::lse_given)};
  }
};

/// Gradients of sum_t d_loss[t] * loss[t] to the indexer; attention gets none.
struct DenseIndexLossBackward {
  Tensor q{};          // [tokens, heads, qk_dim]  as in forward
  Tensor kv{};         // [keys, qk_dim]
  Tensor sink{};       // [heads]
  Tensor index_q{};    // [tokens, index_heads, index_dim]
  Tensor index_k{};    // [index_keys, index_dim]
  Tensor weights{};    // [tokens, index_heads]
  Tensor begin{};      // [tokens]
  Tensor end{};        // [tokens]
  Tensor lse{};        // [tokens, heads]
  Tensor d_loss{};     // [tokens]                          as lse
  Tensor d_index_q{};  // [tokens, index_heads, index_dim]  as index_q, out
  Tensor d_weights{};  // [tokens, index_heads]             as weights, out
  Tensor d_index_k{};  // [index_keys, index_dim]           as lse: added to; else as index_k,
                       //   overwritten, rounded once
  float scale = 0;
  std::int32_t key_offset = 0;

  static constexpr char kOperator[] = "dense_index_loss_backward";
  static constexpr auto fields() {
    using Args = DenseIndexLossBackward;
    return std::tuple{fields::input("q", &Args::q),
                      fields::input("kv", &Args::kv),
                      fields::input("sink", &Args::sink),
                      fields::input("index_q", &Args::index_q),
                      fields::input("index_k", &Args::index_k),
                      fields::input("weights", &Args::weights),
                      fields::input("begin", &Args::begin),
                      fields::input("end", &Args::end),
                      fields::input("lse", &Args::lse),
                      fields::input("d_loss", &Args::d_loss),
                      fields::output("d_index_q", &Args::d_index_q),
                      fields::output("d_weights", &Args::d_weights),
                      fields::output("d_index_k", &Args::d_index_k),
                      fields::option("scale", &Args::scale),
                      fields::option("key_offset", &Args::key_offset)};
  }
};

extern template struct Operator<IndexTarget>;
extern template struct Operator<IndexLoss>;
extern template struct Operator<DenseIndexLossForward>;
extern template struct Operator<DenseIndexLossBackward>;

inline void index_target(const IndexTarget& args, const Execution& execution = {}) {
  run(args, execution);
}
inline void index_loss(const IndexLoss& args, const Execution& execution = {}) {
  run(args, execution);
}
inline void dense_index_loss_forward(const DenseIndexLossForward& args,
                                     const Execution& execution = {}) {
  run(args, execution);
}
inline void dense_index_loss_backward(const DenseIndexLossBackward& args,
                                      const Execution& execution = {}) {
  run(args, execution);
}

}  // namespace winnow
