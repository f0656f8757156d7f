// SPDX-License-Identifier: Apache-2.0
// Random small calls of every op, all of them valid.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "tests/calls.h"

namespace winnow::tests {

inline const Values kIntChoices = {-1, 0, 1, 2, 3, kMinInt32, kMaxInt32};
inline const Values kScaleChoices = {kNaN, kInfinity, -kInfinity, 0, -0.5, 0.125};

inline DType activation(CallMaker& m) { return m.one_of({DType::bf16, DType::f16, DType::f32}); }

/// Index lists over `keys` keys, with invalid and repeated entries.
inline Ints index_list(CallMaker& m, std::int64_t count, std::int64_t keys) {
  Ints result;
  for (std::int64_t i = 0; i < count; ++i)
    result.push_back(static_cast<std::int32_t>(m.between(-1, keys)));
  return result;
}

inline Ints numbers_up_to(CallMaker& m, std::int64_t count, std::int64_t most) {
  Ints result;
  for (std::int64_t i = 0; i < count; ++i)
    result.push_back(static_cast<std::int32_t>(m.between(0, most)));
  return result;
}

inline void maybe_lengths(CallMaker& m, Tensor& lengths, std::int64_t tokens, std::int64_t topk) {
  if (m.perhaps()) return m.absent("lengths", lengths);
  m.ints("lengths", lengths, {tokens}, numbers_up_to(m, tokens, topk));
}

inline void windows(CallMaker& m, Tensor& begin, Tensor& end, std::int64_t tokens,
                    std::int64_t keys) {
  Ints first = numbers_up_to(m, tokens, keys);
  Ints last;
  for (const std::int32_t b : first) last.push_back(static_cast<std::int32_t>(m.between(b, keys)));
  m.ints("begin", begin, {tokens}, first);
  m.ints("end", end, {tokens}, last);
}

/// The offsets of a few documents, and their number of rows.
template <class Args>
std::int32_t documents(CallMaker& m, Args& args) {
  const std::int64_t count = m.between(0, 3);
  Ints real = {0};
  Ints padded = {0};
  const bool has_padding = m.perhaps();
  for (std::int64_t i = 0; i < count; ++i) {
    real.push_back(real.back() + static_cast<std::int32_t>(m.between(0, 5)));
    const std::int64_t padding = has_padding ? m.between(0, 2) : 0;
    padded.push_back(padded.back() + real[i + 1] - real[i] + static_cast<std::int32_t>(padding));
  }
  m.ints("cu_seqlens", args.cu_seqlens, {count + 1}, real);
  has_padding ? m.ints("cu_seqlens_padded", args.cu_seqlens_padded, {count + 1}, padded)
              : m.absent("cu_seqlens_padded", args.cu_seqlens_padded);
  return padded.back();
}

inline std::int64_t query_rows(CallMaker& m, Tensor& query_rows, std::int32_t rows) {
  const std::int64_t tokens = m.between(0, 6);
  if (m.perhaps()) {
    m.absent("query_rows", query_rows);
  } else {
    m.ints("query_rows", query_rows, {tokens}, index_list(m, tokens, rows + 1));
  }
  return tokens;
}

inline Call key_windows_call(CallMaker& m) {
  auto& args = m.start<KeyWindows>("key_windows");
  const std::int64_t tokens = query_rows(m, args.query_rows, documents(m, args));
  args.ratio = static_cast<std::int32_t>(m.between(1, 3));
  args.padding_rows = m.one_of({PaddingRows::empty, PaddingRows::see_document});
  m.number("ratio", args.ratio, kIntChoices);
  m.number("padding_rows", args.padding_rows, {-1, 0, 1, 2, kMaxInt32});
  m.output("begin", args.begin, DType::i32, {tokens});
  m.output("end", args.end, DType::i32, {tokens});
  return m.finish();
}

inline Call window_indices_call(CallMaker& m) {
  auto& args = m.start<WindowIndices>("window_indices");
  const std::int32_t rows = documents(m, args);
  const std::int64_t tokens = query_rows(m, args.query_rows, rows);
  args.window = static_cast<std::int32_t>(m.between(0, 4));
  args.ratio = m.perhaps() ? 0 : static_cast<std::int32_t>(m.between(2, 4));
  args.key_offset = rows + static_cast<std::int32_t>(m.between(0, 2));
  m.number("window", args.window, kIntChoices);
  m.number("ratio", args.ratio, kIntChoices);
  m.number("key_offset", args.key_offset, kIntChoices);
  const std::int64_t pools = m.between(0, 4);
  if (args.ratio > 0 && m.perhaps()) {
    m.ints("pool_ids", args.pool_ids, {tokens, pools}, index_list(m, tokens * pools, rows));
  } else {
    m.absent("pool_ids", args.pool_ids);
  }
  m.output("indices", args.indices, DType::i32, {tokens, m.between(11, 13)});
  m.output("lengths", args.lengths, DType::i32, {tokens});
  return m.finish();
}

inline Call index_topk_forward_call(CallMaker& m) {
  auto& args = m.start<IndexTopkForward>("index_topk_forward");
  const std::int64_t tokens = m.between(0, 4), heads = m.between(1, 3), keys = m.between(0, 9);
  const std::int64_t dim = 8 * m.between(1, 2), topk = m.between(1, 6);
  const DType dtype = m.one_of({DType::bf16, DType::f16, DType::f32, DType::f8_e4m3});
  m.floats("q", args.q, dtype, {tokens, heads, dim}, 2, 1);
  m.floats("k", args.k, dtype, {keys, dim}, 2, 1);
  m.floats("weights", args.weights, DType::f32, {tokens, heads}, 3, 1);
  dtype == DType::f8_e4m3 ? m.floats("k_scale", args.k_scale, DType::f32, {keys}, 2, 0.5)
                          : m.absent("k_scale", args.k_scale);
  windows(m, args.begin, args.end, tokens, keys);
  args.replay = m.below(4) == 0;
  if (args.replay) {
    m.ints("indices", args.indices, {tokens, topk}, index_list(m, tokens * topk, keys));
    maybe_lengths(m, args.lengths, tokens, topk);
  } else {
    m.output("indices", args.indices, DType::i32, {tokens, topk});
    m.perhaps() ? m.output("lengths", args.lengths, DType::i32, {tokens})
                : m.absent("lengths", args.lengths, true);
  }
  args.replay || m.perhaps() ? m.output("scores", args.scores, DType::f32, {tokens, topk})
                             : m.absent("scores", args.scores, true);
  m.number("order", args.order, {-1, 0, 1, 2, kMaxInt32});
  m.number("replay", args.replay, {1});  // without replay these inputs would be outputs
  return m.finish();
}

inline Call index_topk_backward_call(CallMaker& m) {
  auto& args = m.start<IndexTopkBackward>("index_topk_backward");
  const std::int64_t tokens = m.between(0, 4), heads = m.between(1, 3), keys = m.between(0, 9);
  const std::int64_t dim = 8 * m.between(1, 2), topk = m.between(1, 6);
  const DType dtype = activation(m);
  m.floats("q", args.q, dtype, {tokens, heads, dim}, 2, 1);
  m.floats("k", args.k, dtype, {keys, dim}, 2, 1);
  m.floats("weights", args.weights, DType::f32, {tokens, heads}, 3, 1);
  windows(m, args.begin, args.end, tokens, keys);
  m.ints("indices", args.indices, {tokens, topk}, index_list(m, tokens * topk, keys));
  maybe_lengths(m, args.lengths, tokens, topk);
  m.floats("d_scores", args.d_scores, DType::f32, {tokens, topk}, 2, 1);
  m.output("d_q", args.d_q, dtype, {tokens, heads, dim});
  m.output("d_weights", args.d_weights, DType::f32, {tokens, heads});
  m.sum("d_k", args.d_k, dtype, {keys, dim});
  return m.finish();
}

/// The sizes common to sparse_attention forward and backward.
struct AttentionSizes {
  std::int64_t batch, tokens, heads, keys, qk_dim, v_dim, topk;
  DType dtype;

  Shape of(Shape inner) const {
    if (batch > 0) inner.insert(inner.begin(), batch);
    return inner;
  }
};

template <class Args>
AttentionSizes attention_inputs(CallMaker& m, Args& args) {
  AttentionSizes n{m.below(4) == 0 ? m.between(1, 2) : 0,
                   m.between(0, 3),
                   m.between(1, 3),
                   m.between(0, 6),
                   8 * m.between(1, 3),
                   8,
                   m.between(1, 5),
                   activation(m)};
  if (n.qk_dim > 8 && m.perhaps()) n.v_dim = 16;
  const std::int64_t rows = n.tokens * std::max<std::int64_t>(n.batch, 1);
  m.floats("q", args.q, n.dtype, n.of({n.tokens, n.heads, n.qk_dim}), 4, 0.25);
  m.floats("kv", args.kv, n.dtype, n.of({n.keys, n.qk_dim}), 4, 0.25);
  m.ints("indices", args.indices, n.of({n.tokens, n.topk}), index_list(m, rows * n.topk, n.keys));
  if (m.perhaps()) {
    m.absent("lengths", args.lengths);
  } else {
    m.ints("lengths", args.lengths, n.of({n.tokens}), numbers_up_to(m, rows, n.topk));
  }
  m.perhaps() ? m.floats("sink", args.sink, DType::f32, {n.heads}, 4, 0.25)
              : m.absent("sink", args.sink);
  args.scale = n.v_dim == n.qk_dim && m.perhaps() ? 0.0F : 0.25F;
  m.number("scale", args.scale, kScaleChoices);
  return n;
}

inline Call sparse_attention_forward_call(CallMaker& m) {
  auto& args = m.start<SparseAttentionForward>("sparse_attention_forward");
  const AttentionSizes n = attention_inputs(m, args);
  m.output("out", args.out, n.dtype, n.of({n.tokens, n.heads, n.v_dim}));
  m.output("lse", args.lse, DType::f32, n.of({n.tokens, n.heads}));
  m.perhaps() ? m.output("max_logits", args.max_logits, DType::f32, n.of({n.tokens, n.heads}))
              : m.absent("max_logits", args.max_logits, true);
  return m.finish();
}

inline Call sparse_attention_backward_call(CallMaker& m) {
  auto& args = m.start<SparseAttentionBackward>("sparse_attention_backward");
  const AttentionSizes n = attention_inputs(m, args);
  m.floats("out", args.out, n.dtype, n.of({n.tokens, n.heads, n.v_dim}), 4, 0.25);
  m.floats("lse", args.lse, DType::f32, n.of({n.tokens, n.heads}), 4, 0.25);
  m.floats("d_out", args.d_out, n.dtype, n.of({n.tokens, n.heads, n.v_dim}), 4, 0.25);
  m.perhaps() ? m.floats("d_lse", args.d_lse, DType::f32, n.of({n.tokens, n.heads}), 4, 0.25)
              : m.absent("d_lse", args.d_lse);
  m.output("d_q", args.d_q, n.dtype, n.of({n.tokens, n.heads, n.qk_dim}));
  m.sum("d_kv", args.d_kv, n.dtype, n.of({n.keys, n.qk_dim}));
  args.sink&& m.perhaps() ? m.sum("d_sink", args.d_sink, DType::f32, {n.heads})
                          : m.absent("d_sink", args.d_sink, true);
  m.number("max_heads_per_pass", args.max_heads_per_pass, kIntChoices);
  return m.finish();
}

inline Call value_projection_forward_call(CallMaker& m) {
  auto& args = m.start<ValueProjectionForward>("value_projection_forward");
  const std::int64_t tokens = m.between(0, 4), heads = m.between(1, 3), head_dim = m.between(1, 5);
  const std::int64_t v_dim = 8 * m.between(1, 2);
  const DType dtype = activation(m);
  m.floats("out", args.out, dtype, {tokens, heads, v_dim}, 2, 1);
  m.floats("w_v", args.w_v, dtype, {heads, head_dim, v_dim}, 2, 1);
  m.output("out_v", args.out_v, dtype, {tokens, heads, head_dim});
  return m.finish();
}

inline Call value_projection_backward_call(CallMaker& m) {
  auto& args = m.start<ValueProjectionBackward>("value_projection_backward");
  const std::int64_t tokens = m.between(0, 4), heads = m.between(1, 3), head_dim = m.between(1, 5);
  const std::int64_t v_dim = 8 * m.between(1, 2);
  const DType dtype = activation(m);
  m.floats("out", args.out, dtype, {tokens, heads, v_dim}, 2, 1);
  m.floats("w_v", args.w_v, dtype, {heads, head_dim, v_dim}, 2, 1);
  m.floats("d_out_v", args.d_out_v, dtype, {tokens, heads, head_dim}, 2, 1);
  m.output("d_out", args.d_out, dtype, {tokens, heads, v_dim});
  m.sum("d_w_v", args.d_w_v, dtype, {heads, head_dim, v_dim});
  return m.finish();
}

inline Call index_target_call(CallMaker& m) {
  auto& args = m.start<IndexTarget>("index_target");
  const std::int64_t tokens = m.between(0, 4), heads = m.between(1, 3), keys = m.between(0, 6);
  const std::int64_t qk_dim = 8 * m.between(1, 2), topk = m.between(1, 5);
  const DType dtype = activation(m);
  m.floats("q", args.q, dtype, {tokens, heads, qk_dim}, 4, 0.25);
  m.floats("kv", args.kv, dtype, {keys, qk_dim}, 4, 0.25);
  m.ints("indices", args.indices, {tokens, topk}, index_list(m, tokens * topk, keys));
  maybe_lengths(m, args.lengths, tokens, topk);
  m.perhaps() ? m.floats("sink", args.sink, DType::f32, {heads}, 4, 0.25)
              : m.absent("sink", args.sink);
  m.floats("lse", args.lse, DType::f32, {tokens, heads}, 4, 0.25);
  m.output("target", args.target, DType::f32, {tokens, topk});
  args.scale = 0.25F;
  args.key_offset = static_cast<std::int32_t>(m.between(0, keys));
  m.number("scale", args.scale, kScaleChoices);
  m.number("key_offset", args.key_offset, kIntChoices);
  return m.finish();
}

inline Call index_loss_call(CallMaker& m) {
  auto& args = m.start<IndexLoss>("index_loss");
  const std::int64_t tokens = m.between(0, 4), topk = m.between(1, 6);
  m.ints("indices", args.indices, {tokens, topk}, index_list(m, tokens * topk, 5));
  maybe_lengths(m, args.lengths, tokens, topk);
  m.floats("scores", args.scores, DType::f32, {tokens, topk}, 8, 0.25);
  m.positives("target", args.target, DType::f32, {tokens, topk}, 4, 0.25);
  m.output("loss", args.loss, DType::f32, {tokens});
  m.output("d_scores", args.d_scores, DType::f32, {tokens, topk});
  return m.finish();
}

struct DenseSizes {
  std::int64_t tokens, heads, keys, qk_dim, index_heads, index_dim, index_keys;
  DType dtype;
};

template <class Args>
DenseSizes dense_inputs(CallMaker& m, Args& args) {
  DenseSizes n{m.between(0, 3),
               m.between(1, 3),
               m.between(0, 7),
               8 * m.between(1, 2),
               m.between(1, 2),
               8 * m.between(1, 2),
               0,
               activation(m)};
  args.key_offset = static_cast<std::int32_t>(m.between(0, n.keys));
  n.index_keys = m.between(0, n.keys - args.key_offset);
  m.floats("q", args.q, n.dtype, {n.tokens, n.heads, n.qk_dim}, 4, 0.25);
  m.floats("kv", args.kv, n.dtype, {n.keys, n.qk_dim}, 4, 0.25);
  m.perhaps() ? m.floats("sink", args.sink, DType::f32, {n.heads}, 4, 0.25)
              : m.absent("sink", args.sink);
  m.floats("index_q", args.index_q, n.dtype, {n.tokens, n.index_heads, n.index_dim}, 2, 1);
  m.floats("index_k", args.index_k, n.dtype, {n.index_keys, n.index_dim}, 2, 1);
  m.floats("weights", args.weights, DType::f32, {n.tokens, n.index_heads}, 2, 0.125);
  windows(m, args.begin, args.end, n.tokens, n.index_keys);
  args.scale = 0.25F;
  m.number("scale", args.scale, kScaleChoices);
  m.number("key_offset", args.key_offset, kIntChoices);
  return n;
}

inline Call dense_index_loss_forward_call(CallMaker& m) {
  auto& args = m.start<DenseIndexLossForward>("dense_index_loss_forward");
  const DenseSizes n = dense_inputs(m, args);
  m.output("loss", args.loss, DType::f32, {n.tokens});
  m.output("lse", args.lse, DType::f32, {n.tokens, n.heads});
  return m.finish();
}

inline Call dense_index_loss_backward_call(CallMaker& m) {
  auto& args = m.start<DenseIndexLossBackward>("dense_index_loss_backward");
  const DenseSizes n = dense_inputs(m, args);
  m.floats("lse", args.lse, DType::f32, {n.tokens, n.heads}, 4, 0.25);
  m.floats("d_loss", args.d_loss, DType::f32, {n.tokens}, 4, 0.25);
  m.output("d_index_q", args.d_index_q, n.dtype, {n.tokens, n.index_heads, n.index_dim});
  m.output("d_weights", args.d_weights, DType::f32, {n.tokens, n.index_heads});
  m.sum("d_index_k", args.d_index_k, n.dtype, {n.index_keys, n.index_dim});
  return m.finish();
}

inline Call quantize_fp8_call(CallMaker& m) {
  auto& args = m.start<QuantizeFp8>("quantize_fp8");
  Shape shape = {m.between(0, 4), m.between(1, 9)};
  if (m.perhaps()) shape.insert(shape.begin(), m.between(0, 3));
  m.floats("x", args.x, activation(m), shape, 100, 0.125);
  m.output("values", args.values, DType::f8_e4m3, shape);
  m.output("scale", args.scale, DType::f32, Shape(shape.begin(), shape.end() - 1));
  m.number("power_of_two", args.power_of_two, {0, 1});
  return m.finish();
}

inline constexpr std::array kCallMakers = {
    key_windows_call,
    window_indices_call,
    index_topk_forward_call,
    index_topk_backward_call,
    sparse_attention_forward_call,
    sparse_attention_backward_call,
    value_projection_forward_call,
    value_projection_backward_call,
    index_target_call,
    index_loss_call,
    dense_index_loss_forward_call,
    dense_index_loss_backward_call,
    quantize_fp8_call,
};

/// A random valid call of a random op.
inline Call make_call(std::uint64_t seed, Device device) {
  CallMaker maker(seed, device);
  return kCallMakers[maker.below(static_cast<std::int64_t>(kCallMakers.size()))](maker);
}

}  // namespace winnow::tests
