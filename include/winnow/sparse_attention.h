// SPDX-License-Identifier: Apache-2.0
// sparse_attention: attention over selected key rows; latent MLA, and MQA with a sink.
#pragma once

#include <tuple>

#include "winnow/call.h"

namespace winnow {

/// With i_j the valid entries of indices[t] (in [0, keys), in slots below lengths[t]; a key that
/// appears twice counts twice):
///   s_j = scale * q[t,h] . kv[i_j]
///   lse = log sum_j exp(s_j)
///   p_j = exp(s_j) / (sum_j exp(s_j) + exp(sink[h]))
///   out[t,h] = sum_j p_j * kv[i_j][:v_dim]
/// A row without keys has out 0, lse and max_logits -inf.
/// All tensors except sink and d_sink may have one more leading dimension, the batch, of which each
/// slice has its own kv.
struct SparseAttentionForward {
  Tensor q{};           // [tokens, heads, qk_dim]  bf16 | f16 | f32 | f64 (reference)
  Tensor kv{};          // [keys, qk_dim]           as q; values are the first v_dim channels
  Tensor indices{};     // [tokens, topk]           i32; topk up to 2^30
  Tensor lengths{};     // [tokens]                 i32, optional: number of slots to use
  Tensor sink{};        // [heads]                  f32 (f64 with f64), optional; -inf: no sink
  Tensor out{};         // [tokens, heads, v_dim]   as q, out
  Tensor lse{};         // [tokens, heads]          as sink, out; natural log, keys only
  Tensor max_logits{};  // [tokens, heads]          as sink, out, optional: largest s_j, ignores NaN
  float scale = 0;      // 0: 1 / sqrt(qk_dim) if v_dim = qk_dim; otherwise it must be given

  static constexpr char kOperator[] = "sparse_attention_forward";
  static constexpr auto fields() {
    using Args = SparseAttentionForward;
    return std::tuple{fields::input("q", &Args::q),
                      fields::input("kv", &Args::kv),
                      fields::input("indices", &Args::indices),
                      fields::input("lengths", &Args::lengths),
                      fields::input("sink", &Args::sink),
                      fields::output("out", &Args::out),
                      fields::output("lse", &Args::lse),
                      fields::output("max_logits", &Args::max_logits),
                      fields::option("scale", &Args::scale)};
  }
};

/// With L = log(exp(lse) + exp(sink[h])), p_j = exp(s_j - L), delta = out[t,h] . d_out[t,h]:
///   dS_j = p_j * (d_out[t,h] . kv[i_j][:v_dim] - delta) + exp(s_j - lse) * d_lse[t,h]
///   d_q[t,h]           = scale * sum_j dS_j * kv[i_j]
///   d_kv[i_j]         += scale * sum_h dS_j * q[t,h]
///   d_kv[i_j][:v_dim] += sum_h p_j * d_out[t,h]
///   d_sink[h]         -= sum_t delta * exp(sink[h] - L)
/// A row without keys contributes to none of them, whatever d_out and d_lse hold. exp(s_j - lse) is
/// at most 1, also where an lse of large logits, rounded to fp32, lies below s_j.
struct SparseAttentionBackward {
  Tensor q{};        // [tokens, heads, qk_dim]  as in forward
  Tensor kv{};       // [keys, qk_dim]
  Tensor indices{};  // [tokens, topk]
  Tensor lengths{};  // [tokens]
  Tensor sink{};     // [heads]
  Tensor out{};      // [tokens, heads, v_dim]
  Tensor lse{};      // [tokens, heads]
  Tensor d_out{};    // [tokens, heads, v_dim]   as q
  Tensor d_lse{};    // [tokens, heads]          as lse, optional
  Tensor d_q{};      // [tokens, heads, qk_dim]  as q, out
  Tensor d_kv{};     // [keys, qk_dim]           as lse: added to; else as q, overwritten,
                     //   rounded once
  Tensor d_sink{};   // [heads]                  as sink, added to, optional
  float scale = 0;
  std::int32_t max_heads_per_pass = 0;  // 0: all at once

  static constexpr char kOperator[] = "sparse_attention_backward";
  static constexpr auto fields() {
    using Args = SparseAttentionBackward;
    return std::tuple{fields::input("q", &Args::q),
                      fields::input("kv", &Args::kv),
                      fields::input("indices", &Args::indices),
                      fields::input("lengths", &Args::lengths),
                      fields::input("sink", &Args::sink),
                      fields::input("out", &Args::out),
                      fields::input("lse", &Args::lse),
                      fields::input("d_out", &Args::d_out),
                      fields::input("d_lse", &Args::d_lse),
                      fields::output("d_q", &Args::d_q),
                      fields::output("d_kv", &Args::d_kv),
                      fields::output("d_sink", &Args::d_sink),
                      fields::option("scale", &Args::scale),
                      fields::option("max_heads_per_pass", &Args::max_heads_per_pass)};
  }
};

extern template struct Operator<SparseAttentionForward>;
extern template struct Operator<SparseAttentionBackward>;

inline void sparse_attention_forward(const SparseAttentionForward& args,
                                     const Execution& execution = {}) {
  run(args, execution);
}
inline void sparse_attention_backward(const SparseAttentionBackward& args,
                                      const Execution& execution = {}) {
  run(args, execution);
}

}  // namespace winnow
