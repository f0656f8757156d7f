// SPDX-License-Identifier: Apache-2.0
// index_topk: the scores of the lightning indexer and the exact top-k of every query row.
#pragma once

#include <tuple>

#include "winnow/call.h"

namespace winnow {

enum class SlotOrder : std::int32_t {
  ascending,  // by key row
  by_score    // larger first, equal scores by smaller key row
};

/// score[t,s] = sum_h weights[t,h] * max(q[t,h] . k[s], 0)   for s in [begin[t], end[t])
/// max propagates NaN; with fp8, k[s] means k_scale[s] * k[s].
/// The topk largest scores of a row are selected. Ties (+0 and -0 are equal) go to the smaller key
/// row; NaN and -inf are never selected. Valid slots come first; after them indices are -1 and
/// scores -inf. With `replay`, indices (and lengths, if present) are read and only scores are
/// written: -inf for a slot past lengths or whose index is not in the window. They are inputs then,
/// which may share memory with others.
struct IndexTopkForward {
  Tensor q{};        // [tokens, index_heads, index_dim]  bf16 | f16 | f32 | f8_e4m3 | f64
  Tensor k{};        // [keys, index_dim]                 as q; f64: reference only
  Tensor weights{};  // [tokens, index_heads]             f32 (f64 with f64), all scales folded in
  Tensor k_scale{};  // [keys]                            f32, with f8_e4m3 only
  Tensor begin{};    // [tokens]                          i32
  Tensor end{};      // [tokens]                          i32
  Tensor indices{};  // [tokens, topk]                    i32, out; in, if replay; topk up to 2^30
  Tensor lengths{};  // [tokens]                          i32, optional, out; in, if replay
  Tensor scores{};   // [tokens, topk]                    as weights, out, optional unless replay
  SlotOrder order = SlotOrder::ascending;
  bool replay = false;

  static constexpr char kOperator[] = "index_topk_forward";
  static constexpr auto fields() {
    using Args = IndexTopkForward;
    return std::tuple{fields::input("q", &Args::q),
                      fields::input("k", &Args::k),
                      fields::input("weights", &Args::weights),
                      fields::input("k_scale", &Args::k_scale),
                      fields::input("begin", &Args::begin),
                      fields::input("end", &Args::end),
                      fields::output("indices", &Args::indices),
                      fields::output("lengths", &Args::lengths),
                      fields::output("scores", &Args::scores),
                      fields::option("order", &Args::order, "ascending|by_score"),
                      fields::option("replay", &Args::replay)};
  }
};

/// Gradients from d_scores, over the slots whose index i = indices[t,j] is in the window, with
/// a = q[t,h] . k[i]:
///   d_weights[t,h] = sum_j d_scores[t,j] * max(a, 0)
///   d_q[t,h]       = sum_j d_scores[t,j] * weights[t,h] * [a > 0] * k[i]
///   d_k[i]        += sum_h d_scores[t,j] * weights[t,h] * [a > 0] * q[t,h]
/// d_scores of other slots, NaN included, has no effect.
struct IndexTopkBackward {
  Tensor q{};          // [tokens, index_heads, index_dim]  bf16 | f16 | f32 | f64 (reference)
  Tensor k{};          // [keys, index_dim]                 as q
  Tensor weights{};    // [tokens, index_heads]             f32 (f64 with f64)
  Tensor begin{};      // [tokens]                          i32
  Tensor end{};        // [tokens]                          i32
  Tensor indices{};    // [tokens, topk]                    i32
  Tensor lengths{};    // [tokens]                          i32, optional
  Tensor d_scores{};   // [tokens, topk]                    as weights
  Tensor d_q{};        // [tokens, index_heads, index_dim]  as q, out
  Tensor d_weights{};  // [tokens, index_heads]             as weights, out
  Tensor d_k{};        // [keys, index_dim]                 as weights: added to; else as q,
                       //   overwritten, rounded once

  static constexpr char kOperator[] = "index_topk_backward";
  static constexpr auto fields() {
    using Args = IndexTopkBackward;
    return std::tuple{fields::input("q", &Args::q),
                      fields::input("k", &Args::k),
                      fields::input("weights", &Args::weights),
                      fields::input("begin", &Args::begin),
                      fields::input("end", &Args::end),
                      fields::input("indices", &Args::indices),
                      fields::input("lengths", &Args::lengths),
                      fields::input("d_scores", &Args::d_scores),
                      fields::output("d_q", &Args::d_q),
                      fields::output("d_weights", &Args::d_weights),
                      fields::output("d_k", &Args::d_k)};
  }
};

extern template struct Operator<IndexTopkForward>;
extern template struct Operator<IndexTopkBackward>;

inline void index_topk_forward(const IndexTopkForward& args, const Execution& execution = {}) {
  run(args, execution);
}
inline void index_topk_backward(const IndexTopkBackward& args, const Execution& execution = {}) {
  run(args, execution);
}

}  // namespace winnow
