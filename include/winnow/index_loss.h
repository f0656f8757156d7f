// SPDX-License-Identifier: Apache-2.0
// index_target, index_loss, dense_index_loss: training the indexer to match the attention that uses
// its selection.
#pragma once

#include "winnow/execution.h"
#include "winnow/tensor.h"

namespace winnow {

/// target[t,j] = sum_h p[t,h,j], with p of sparse_attention and the lse of that call; 0 in slots
/// without a key. Not normalised, so that tensor-parallel ranks can sum theirs first. The key of
/// slot j is kv[key_offset + indices[t,j]], if indices[t,j] >= 0 and j < lengths[t].
struct IndexTarget {
  Tensor q{};                   // [tokens, heads, qk_dim]  bf16 | f16 | f32 | f64 (reference)
  Tensor kv{};                  // [keys, qk_dim]           as q
  Tensor indices{};             // [tokens, topk]           i32
  Tensor lengths{};             // [tokens]                 i32, optional
  Tensor sink{};                // [heads]                  f32 (f64 with f64), optional
  Tensor lse{};                 // [tokens, heads]          as sink
  Tensor target{};              // [tokens, topk]           as sink, out
  float scale = 0;              // as given to sparse_attention; there is no default
  std::int32_t key_offset = 0;  // the row of kv at which the indexer's keys begin
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
};

/// The loss of the warm-up stage: the same KL over the whole window of every row, between dense
/// attention over that window and the indexer's scores (as in index_topk). Key s of the indexer is
/// kv[key_offset + s].
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
  Tensor lse{};      // [tokens, heads]                   as sink, out: over the window, keys only
  float scale = 0;   // there is no default
  std::int32_t key_offset = 0;
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
};

void index_target(const IndexTarget& args, const Execution& execution = {});
void index_loss(const IndexLoss& args, const Execution& execution = {});
void dense_index_loss_forward(const DenseIndexLossForward& args, const Execution& execution = {});
void dense_index_loss_backward(const DenseIndexLossBackward& args, const Execution& execution = {});
std::size_t workspace_bytes(const IndexTarget& args, const Execution& execution = {});
std::size_t workspace_bytes(const IndexLoss& args, const Execution& execution = {});
std::size_t workspace_bytes(const DenseIndexLossForward& args, const Execution& execution = {});
std::size_t workspace_bytes(const DenseIndexLossBackward& args, const Execution& execution = {});
std::string why_not(const IndexTarget& args, const Execution& execution = {});
std::string why_not(const IndexLoss& args, const Execution& execution = {});
std::string why_not(const DenseIndexLossForward& args, const Execution& execution = {});
std::string why_not(const DenseIndexLossBackward& args, const Execution& execution = {});

}  // namespace winnow
