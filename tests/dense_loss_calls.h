// SPDX-License-Identifier: Apache-2.0
// One call of dense_index_loss as plain vectors.
#pragma once

#include <algorithm>
#include <cstdint>

#include "tests/testing.h"

namespace winnow::tests {

struct DenseLoss {
  std::int64_t tokens = 6;
  std::int64_t keys = 18;        // of attention
  std::int64_t index_keys = 15;  // of the indexer, from key_offset on
  std::int32_t key_offset = 3;
  std::int64_t heads = 3;
  std::int64_t qk_dim = 24;
  std::int64_t index_heads = 2;
  std::int64_t index_dim = 16;
  DType dtype = DType::bf16;
  float scale = 0.25F;
  std::int64_t row_padding = 0;

  Values q{}, kv{}, index_q{}, index_k{}, weights{}, d_loss{};
  Values sink{};  // empty: absent
  Ints begin{}, end{};

  DType d_index_k_type = DType::f32;
  Values d_index_k_before{};  // empty: zeros

  DType sum_type() const { return type_of_sums(dtype); }
};

struct DenseLossOutputs {
  Values loss, lse;
};

struct DenseLossGradients {
  Values d_index_q, d_weights, d_index_k;
};

/// Normally distributed values; windows that grow with the row, from none and one key on.
inline DenseLoss filled(DenseLoss d, std::uint64_t seed) {
  d.q = normals(d.tokens * d.heads * d.qk_dim, seed, "q");
  d.kv = normals(d.keys * d.qk_dim, seed, "kv");
  d.index_q = normals(d.tokens * d.index_heads * d.index_dim, seed, "index_q");
  d.index_k = normals(d.index_keys * d.index_dim, seed, "index_k");
  d.weights = normals(d.tokens * d.index_heads, seed, "weights");
  d.d_loss = normals(d.tokens, seed, "d_loss");
  d.begin.clear();
  d.end.clear();
  for (std::int64_t t = 0; t < d.tokens; ++t) {
    const std::int64_t begin = t % 2 == 0 ? 0 : std::min<std::int64_t>(2, d.index_keys);
    const std::int64_t length = t < 2 ? t : d.index_keys * (t + 1) / d.tokens;
    d.begin.push_back(static_cast<std::int32_t>(begin));
    d.end.push_back(static_cast<std::int32_t>(std::min(begin + length, d.index_keys)));
  }
  return d;
}

/// The same call with only the query rows [first, first + count).
inline DenseLoss rows_of(const DenseLoss& d, std::int64_t first, std::int64_t count) {
  DenseLoss result = d;
  result.tokens = count;
  result.q = part(d.q, first * d.heads * d.qk_dim, count * d.heads * d.qk_dim);
  const std::int64_t index_row = d.index_heads * d.index_dim;
  result.index_q = part(d.index_q, first * index_row, count * index_row);
  result.weights = part(d.weights, first * d.index_heads, count * d.index_heads);
  result.d_loss = part(d.d_loss, first, count);
  result.begin = part(d.begin, first, count);
  result.end = part(d.end, first, count);
  return result;
}

/// Buffers and arguments of forward and backward.
struct DenseLossWork {
  DenseLossWork(const DenseLoss& d, Device device)
      : loss(memory.add("loss", Buffer(device, d.sum_type(), {d.tokens}))),
        lse(memory.add("lse", Buffer(device, d.sum_type(), {d.tokens, d.heads}))),
        d_index_q(memory.add(
            "d_index_q",
            Buffer(device, d.dtype, {d.tokens, d.index_heads, d.index_dim}, d.row_padding))),
        d_weights(memory.add("d_weights", Buffer(device, d.sum_type(), {d.tokens, d.index_heads}))),
        d_index_k(memory.add("d_index_k",
                             sum(device, d.dtype, d.d_index_k_type, {d.index_keys, d.index_dim},
                                 d.d_index_k_before, d.row_padding))) {
    const auto add = [&](const char* name, DType dtype, const Shape& shape, const Values& values,
                         std::int64_t row_padding = 0) {
      memory.add(name, floats(device, dtype, shape, values, row_padding));
    };
    add("q", d.dtype, {d.tokens, d.heads, d.qk_dim}, d.q, d.row_padding);
    add("kv", d.dtype, {d.keys, d.qk_dim}, d.kv, d.row_padding);
    add("sink", d.sum_type(), {d.heads}, d.sink);
    add("index_q", d.dtype, {d.tokens, d.index_heads, d.index_dim}, d.index_q, d.row_padding);
    add("index_k", d.dtype, {d.index_keys, d.index_dim}, d.index_k, d.row_padding);
    add("weights", d.sum_type(), {d.tokens, d.index_heads}, d.weights);
    add("d_loss", d.sum_type(), {d.tokens}, d.d_loss);
    memory.add("begin", ints(device, {d.tokens}, d.begin));
    memory.add("end", ints(device, {d.tokens}, d.end));
    forward = memory.arguments<DenseIndexLossForward>();
    backward = memory.arguments<DenseIndexLossBackward>();
    forward.scale = backward.scale = d.scale;
    forward.key_offset = backward.key_offset = d.key_offset;
  }

  DenseLossOutputs outputs() const {
    expect_canaries_intact(memory);
    return {loss.download(), lse.download()};
  }
  DenseLossGradients gradients() const {
    expect_canaries_intact(memory);
    return {d_index_q.download(), d_weights.download(), d_index_k.download()};
  }

  NamedBuffers memory;
  Buffer &loss, &lse, &d_index_q, &d_weights, &d_index_k;
  DenseIndexLossForward forward;
  DenseIndexLossBackward backward;
};

inline DenseLossOutputs forward(const DenseLoss& d, const Execution& execution) {
  const DenseLossWork work(d, harness::device_of(execution.backend));
  run_where_taken(work.forward, execution);
  return work.outputs();
}

/// The same with the lse of attention given.
inline DenseLossOutputs forward(const DenseLoss& d, const Values& lse, const Execution& execution) {
  DenseLossWork work(d, harness::device_of(execution.backend));
  work.lse.upload(lse);
  work.forward.lse_given = true;
  run_where_taken(work.forward, execution);
  return work.outputs();
}

inline DenseLossGradients backward(const DenseLoss& d, const Values& lse,
                                   const Execution& execution) {
  DenseLossWork work(d, harness::device_of(execution.backend));
  work.lse.upload(lse);
  run_where_taken(work.backward, execution);
  return work.gradients();
}

}  // namespace winnow::tests
