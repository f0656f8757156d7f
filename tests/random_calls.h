// SPDX-License-Identifier: Apache-2.0
// Random small calls of every op, all of them valid.
#pragma once

#include <algorithm>
#include <cstdint>
#include <tuple>
#include <type_traits>

#include "tests/call_maker.h"

namespace winnow::tests {

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
  if (!m.perhaps()) m.ints(lengths, {tokens}, numbers_up_to(m, tokens, topk));
}

inline void windows(CallMaker& m, Tensor& begin, Tensor& end, std::int64_t tokens,
                    std::int64_t keys) {
  Ints first = numbers_up_to(m, tokens, keys);
  Ints last;
  for (const std::int32_t b : first) last.push_back(static_cast<std::int32_t>(m.between(b, keys)));
  m.ints(begin, {tokens}, first);
  m.ints(end, {tokens}, last);
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
  m.ints(args.cu_seqlens, {count + 1}, real);
  if (has_padding) m.ints(args.cu_seqlens_padded, {count + 1}, padded);
  return padded.back();
}

inline std::int64_t query_rows(CallMaker& m, Tensor& query_rows, std::int32_t rows) {
  const std::int64_t tokens = m.between(0, 6);
  if (!m.perhaps()) m.ints(query_rows, {tokens}, index_list(m, tokens, rows + 1));
  return tokens;
}

inline void fill(CallMaker& m, KeyWindows& args) {
  const std::int64_t tokens = query_rows(m, args.query_rows, documents(m, args));
  args.ratio = static_cast<std::int32_t>(m.between(1, 3));
  args.padding_rows = m.one_of({PaddingRows::empty, PaddingRows::see_document});
  m.output(args.begin, DType::i32, {tokens});
  m.output(args.end, DType::i32, {tokens});
}

inline void fill(CallMaker& m, WindowIndices& args) {
  const std::int32_t rows = documents(m, args);
  const std::int64_t tokens = query_rows(m, args.query_rows, rows);
  args.window = static_cast<std::int32_t>(m.between(0, 4));
  args.ratio = m.perhaps() ? 0 : static_cast<std::int32_t>(m.between(2, 4));
  args.key_offset = rows + static_cast<std::int32_t>(m.between(0, 2));
  const std::int64_t pools = m.between(0, 4);
  if (args.ratio > 0 && m.perhaps()) {
    m.ints(args.pool_ids, {tokens, pools}, index_list(m, tokens * pools, rows));
  }
  m.output(args.indices, DType::i32, {tokens, m.between(11, 13)});
  m.output(args.lengths, DType::i32, {tokens});
}

inline void fill(CallMaker& m, IndexTopkForward& args) {
  const std::int64_t tokens = m.between(0, 4), heads = m.between(1, 3), keys = m.between(0, 9);
  const std::int64_t dim = 8 * m.between(1, 2), topk = m.between(1, 6);
  const DType dtype = m.one_of({DType::bf16, DType::f16, DType::f32, DType::f8_e4m3});
  m.floats(args.q, dtype, {tokens, heads, dim}, 2, 1);
  m.floats(args.k, dtype, {keys, dim}, 2, 1);
  m.floats(args.weights, DType::f32, {tokens, heads}, 3, 1);
  if (dtype == DType::f8_e4m3) m.floats(args.k_scale, DType::f32, {keys}, 2, 0.5);
  windows(m, args.begin, args.end, tokens, keys);
  args.replay = m.below(4) == 0;
  if (args.replay) {
    m.ints(args.indices, {tokens, topk}, index_list(m, tokens * topk, keys));
    maybe_lengths(m, args.lengths, tokens, topk);
  } else {
    m.output(args.indices, DType::i32, {tokens, topk});
    if (m.perhaps()) m.output(args.lengths, DType::i32, {tokens});
  }
  if (args.replay || m.perhaps()) m.output(args.scores, DType::f32, {tokens, topk});
}

inline void fill(CallMaker& m, IndexTopkBackward& args) {
  const std::int64_t tokens = m.between(0, 4), heads = m.between(1, 3), keys = m.between(0, 9);
  const std::int64_t dim = 8 * m.between(1, 2), topk = m.between(1, 6);
  const DType dtype = activation(m);
  m.floats(args.q, dtype, {tokens, heads, dim}, 2, 1);
  m.floats(args.k, dtype, {keys, dim}, 2, 1);
  m.floats(args.weights, DType::f32, {tokens, heads}, 3, 1);
  windows(m, args.begin, args.end, tokens, keys);
  m.ints(args.indices, {tokens, topk}, index_list(m, tokens * topk, keys));
  maybe_lengths(m, args.lengths, tokens, topk);
  m.floats(args.d_scores, DType::f32, {tokens, topk}, 2, 1);
  m.output(args.d_q, dtype, {tokens, heads, dim});
  m.output(args.d_weights, DType::f32, {tokens, heads});
  m.sum(args.d_k, dtype, {keys, dim});
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
  m.floats(args.q, n.dtype, n.of({n.tokens, n.heads, n.qk_dim}), 4, 0.25);
  m.floats(args.kv, n.dtype, n.of({n.keys, n.qk_dim}), 4, 0.25);
  m.ints(args.indices, n.of({n.tokens, n.topk}), index_list(m, rows * n.topk, n.keys));
  if (!m.perhaps()) m.ints(args.lengths, n.of({n.tokens}), numbers_up_to(m, rows, n.topk));
  if (m.perhaps()) m.floats(args.sink, DType::f32, {n.heads}, 4, 0.25);
  args.scale = n.v_dim == n.qk_dim && m.perhaps() ? 0.0F : 0.25F;
  return n;
}

inline void fill(CallMaker& m, SparseAttentionForward& args) {
  const AttentionSizes n = attention_inputs(m, args);
  m.output(args.out, n.dtype, n.of({n.tokens, n.heads, n.v_dim}));
  m.output(args.lse, DType::f32, n.of({n.tokens, n.heads}));
  if (m.perhaps()) m.output(args.max_logits, DType::f32, n.of({n.tokens, n.heads}));
}

inline void fill(CallMaker& m, SparseAttentionBackward& args) {
  const AttentionSizes n = attention_inputs(m, args);
  m.floats(args.out, n.dtype, n.of({n.tokens, n.heads, n.v_dim}), 4, 0.25);
  m.floats(args.lse, DType::f32, n.of({n.tokens, n.heads}), 4, 0.25);
  m.floats(args.d_out, n.dtype, n.of({n.tokens, n.heads, n.v_dim}), 4, 0.25);
  if (m.perhaps()) m.floats(args.d_lse, DType::f32, n.of({n.tokens, n.heads}), 4, 0.25);
  m.output(args.d_q, n.dtype, n.of({n.tokens, n.heads, n.qk_dim}));
  m.sum(args.d_kv, n.dtype, n.of({n.keys, n.qk_dim}));
  if (args.sink && m.perhaps()) m.sum(args.d_sink, DType::f32, {n.heads});
}

inline void fill(CallMaker& m, ValueProjectionForward& args) {
  const std::int64_t tokens = m.between(0, 4), heads = m.between(1, 3), head_dim = m.between(1, 5);
  const std::int64_t v_dim = 8 * m.between(1, 2);
  const DType dtype = activation(m);
  m.floats(args.out, dtype, {tokens, heads, v_dim}, 2, 1);
  m.floats(args.w_v, dtype, {heads, head_dim, v_dim}, 2, 1);
  m.output(args.out_v, dtype, {tokens, heads, head_dim});
}

inline void fill(CallMaker& m, ValueProjectionBackward& args) {
  const std::int64_t tokens = m.between(0, 4), heads = m.between(1, 3), head_dim = m.between(1, 5);
  const std::int64_t v_dim = 8 * m.between(1, 2);
  const DType dtype = activation(m);
  m.floats(args.out, dtype, {tokens, heads, v_dim}, 2, 1);
  m.floats(args.w_v, dtype, {heads, head_dim, v_dim}, 2, 1);
  m.floats(args.d_out_v, dtype, {tokens, heads, head_dim}, 2, 1);
  m.output(args.d_out, dtype, {tokens, heads, v_dim});
  m.sum(args.d_w_v, dtype, {heads, head_dim, v_dim});
}

inline void fill(CallMaker& m, IndexTarget& args) {
  const std::int64_t tokens = m.between(0, 4), heads = m.between(1, 3), keys = m.between(0, 6);
  const std::int64_t qk_dim = 8 * m.between(1, 2), topk = m.between(1, 5);
  const DType dtype = activation(m);
  m.floats(args.q, dtype, {tokens, heads, qk_dim}, 4, 0.25);
  m.floats(args.kv, dtype, {keys, qk_dim}, 4, 0.25);
  m.ints(args.indices, {tokens, topk}, index_list(m, tokens * topk, keys));
  maybe_lengths(m, args.lengths, tokens, topk);
  if (m.perhaps()) m.floats(args.sink, DType::f32, {heads}, 4, 0.25);
  m.floats(args.lse, DType::f32, {tokens, heads}, 4, 0.25);
  args.accumulate = m.perhaps();
  if (args.accumulate) {
    m.sum(args.target, DType::f32, {tokens, topk});
  } else {
    m.output(args.target, DType::f32, {tokens, topk});
  }
  args.scale = 0.25F;
  args.key_offset = static_cast<std::int32_t>(m.between(0, keys));
}

inline void fill(CallMaker& m, IndexLoss& args) {
  const std::int64_t tokens = m.between(0, 4), topk = m.between(1, 6);
  m.ints(args.indices, {tokens, topk}, index_list(m, tokens * topk, 5));
  maybe_lengths(m, args.lengths, tokens, topk);
  m.floats(args.scores, DType::f32, {tokens, topk}, 8, 0.25);
  m.positives(args.target, DType::f32, {tokens, topk}, 4, 0.25);
  m.output(args.loss, DType::f32, {tokens});
  m.output(args.d_scores, DType::f32, {tokens, topk});
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
  m.floats(args.q, n.dtype, {n.tokens, n.heads, n.qk_dim}, 4, 0.25);
  m.floats(args.kv, n.dtype, {n.keys, n.qk_dim}, 4, 0.25);
  if (m.perhaps()) m.floats(args.sink, DType::f32, {n.heads}, 4, 0.25);
  m.floats(args.index_q, n.dtype, {n.tokens, n.index_heads, n.index_dim}, 2, 1);
  m.floats(args.index_k, n.dtype, {n.index_keys, n.index_dim}, 2, 1);
  m.floats(args.weights, DType::f32, {n.tokens, n.index_heads}, 2, 0.125);
  windows(m, args.begin, args.end, n.tokens, n.index_keys);
  args.scale = 0.25F;
  return n;
}

inline void fill(CallMaker& m, DenseIndexLossForward& args) {
  const DenseSizes n = dense_inputs(m, args);
  m.output(args.loss, DType::f32, {n.tokens});
  args.lse_given = m.perhaps();
  if (args.lse_given) {
    m.floats(args.lse, DType::f32, {n.tokens, n.heads}, 4, 0.25);
  } else {
    m.output(args.lse, DType::f32, {n.tokens, n.heads});
  }
}

inline void fill(CallMaker& m, DenseIndexLossBackward& args) {
  const DenseSizes n = dense_inputs(m, args);
  m.floats(args.lse, DType::f32, {n.tokens, n.heads}, 4, 0.25);
  m.floats(args.d_loss, DType::f32, {n.tokens}, 4, 0.25);
  m.output(args.d_index_q, n.dtype, {n.tokens, n.index_heads, n.index_dim});
  m.output(args.d_weights, DType::f32, {n.tokens, n.index_heads});
  m.sum(args.d_index_k, n.dtype, {n.index_keys, n.index_dim});
}

inline void fill(CallMaker& m, QuantizeFp8& args) {
  Shape shape = {m.between(0, 4), m.between(1, 9)};
  if (m.perhaps()) shape.insert(shape.begin(), m.between(0, 3));
  m.floats(args.x, activation(m), shape, 100, 0.125);
  m.output(args.values, DType::f8_e4m3, shape);
  m.output(args.scale, DType::f32, Shape(shape.begin(), shape.end() - 1));
  args.power_of_two = m.perhaps();
}

/// A random valid call of a random operator: each of the list has a `fill` above.
inline Call make_call(std::uint64_t seed, Device device) {
  CallMaker maker(seed, device);
  Call call;
  std::int64_t left = maker.below(std::tuple_size_v<Operators>);
  for_each_operator([&]<class Args>(std::type_identity<Args>) {
    if (left-- == 0) call = maker.make<Args>();
  });
  return call;
}

}  // namespace winnow::tests
