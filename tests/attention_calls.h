// SPDX-License-Identifier: Apache-2.0
// One call of sparse_attention as plain vectors, which a test can modify before it runs the call.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "tests/sanitized.h"
#include "tests/testing.h"

namespace winnow::tests {

struct Attention {
  std::int64_t batch = 0;  // 0: no batch dimension
  std::int64_t tokens = 6;
  std::int64_t keys = 20;
  std::int64_t heads = 3;
  std::int64_t qk_dim = 24;
  std::int64_t v_dim = 16;
  std::int64_t topk = 9;
  DType dtype = DType::bf16;
  float scale = 0.25F;
  std::int64_t row_padding = 0;
  std::int32_t max_heads_per_pass = 0;
  bool wants_max_logits = true;

  Values q{}, kv{}, d_out{};
  Values sink{}, d_lse{};  // empty: absent
  Ints indices{};
  Ints lengths{};  // empty: absent

  DType d_kv_type = DType::f32;
  Values d_kv_before{};    // empty: zeros
  Values d_sink_before{};  // empty: zeros; d_sink is present if sink is

  std::int64_t slices() const { return std::max<std::int64_t>(batch, 1); }
  std::int64_t rows() const { return slices() * tokens; }
  double scale_or_default() const {
    return scale != 0 ? scale : static_cast<float>(1 / std::sqrt(static_cast<double>(qk_dim)));
  }
  Shape shape(Shape inner) const {
    if (batch > 0) inner.insert(inner.begin(), batch);
    return inner;
  }
};

struct AttentionOutputs {
  Values out, lse, max_logits;
  Values sums{};  // sum_j p_j |v_j| for each element of out, the scale of its error
};

struct AttentionGradients {
  Values d_q, d_kv, d_sink;
};

/// Fills all tensors: normally distributed values, and distinct keys in random order in every row.
inline Attention filled(Attention a, std::uint64_t seed) {
  a.q = normals(a.rows() * a.heads * a.qk_dim, seed, "q");
  a.kv = normals(a.slices() * a.keys * a.qk_dim, seed, "kv");
  a.d_out = normals(a.rows() * a.heads * a.v_dim, seed, "d_out");
  a.d_lse = normals(a.rows() * a.heads, seed, "d_lse");
  a.indices.clear();
  const Random random(seed, "indices");
  std::int64_t draw = 0;
  for (std::int64_t t = 0; t < a.rows(); ++t) {
    Ints keys(static_cast<std::size_t>(a.keys));
    for (std::int64_t s = 0; s < a.keys; ++s) keys[s] = static_cast<std::int32_t>(s);
    for (std::int64_t s = a.keys - 1; s > 0; --s)
      std::swap(keys[s], keys[random.below(draw++, s + 1)]);
    keys.resize(static_cast<std::size_t>(a.topk), -1);
    a.indices.insert(a.indices.end(), keys.begin(), keys.end());
  }
  return a;
}

inline Attention with_sink(Attention a, std::uint64_t seed) {
  a.sink = normals(a.heads, seed, "sink");
  return a;
}

/// The same call with only the query rows [first, first + count).
inline Attention rows_of(const Attention& a, std::int64_t first, std::int64_t count) {
  Attention result = a;
  result.tokens = count;
  result.q = part(a.q, first * a.heads * a.qk_dim, count * a.heads * a.qk_dim);
  result.d_out = part(a.d_out, first * a.heads * a.v_dim, count * a.heads * a.v_dim);
  if (!a.d_lse.empty()) result.d_lse = part(a.d_lse, first * a.heads, count * a.heads);
  result.indices = part(a.indices, first * a.topk, count * a.topk);
  if (!a.lengths.empty()) result.lengths = part(a.lengths, first, count);
  return result;
}

inline AttentionOutputs rows_of(const Attention& a, const AttentionOutputs& outputs,
                                std::int64_t first, std::int64_t count) {
  const std::int64_t out_row = a.heads * a.v_dim;
  return {part(outputs.out, first * out_row, count * out_row),
          part(outputs.lse, first * a.heads, count * a.heads),
          part(outputs.max_logits, first * a.heads, count * a.heads)};
}

/// Buffers and arguments of a forward call.
struct AttentionForwardWork {
  AttentionForwardWork(const Attention& a, Device device)
      : q(memory.add("q", floats(device, a.dtype, a.shape({a.tokens, a.heads, a.qk_dim}), a.q,
                                 a.row_padding))),
        kv(memory.add("kv",
                      floats(device, a.dtype, a.shape({a.keys, a.qk_dim}), a.kv, a.row_padding))),
        indices(memory.add("indices",
                           ints(device, a.shape({a.tokens, a.topk}), a.indices, a.row_padding))),
        lengths(memory.add("lengths", ints(device, a.shape({a.tokens}), a.lengths))),
        sink(memory.add("sink", floats(device, type_of_sums(a.dtype), {a.heads}, a.sink))),
        out(memory.add(
            "out", Buffer(device, a.dtype, a.shape({a.tokens, a.heads, a.v_dim}), a.row_padding))),
        lse(memory.add("lse", Buffer(device, type_of_sums(a.dtype), a.shape({a.tokens, a.heads}),
                                     a.row_padding))),
        max_logits(memory.add(
            "max_logits", a.wants_max_logits
                              ? Buffer(device, type_of_sums(a.dtype), a.shape({a.tokens, a.heads}))
                              : Buffer())),
        args(memory.arguments<SparseAttentionForward>()) {
    args.scale = a.scale;
  }

  AttentionOutputs outputs() const {
    expect_canaries_intact(memory);
    return {out.download(), lse.download(), max_logits.download()};
  }

  NamedBuffers memory;
  Buffer &q, &kv, &indices, &lengths, &sink, &out, &lse, &max_logits;
  SparseAttentionForward args;
};

/// Buffers and arguments of a backward call.
struct AttentionBackwardWork {
  AttentionBackwardWork(const Attention& a, const AttentionOutputs& outputs, Device device)
      : forward(a, device),
        d_out(forward.memory.add(
            "d_out", floats(device, a.dtype, a.shape({a.tokens, a.heads, a.v_dim}), a.d_out,
                            a.row_padding))),
        d_lse(forward.memory.add(
            "d_lse", floats(device, type_of_sums(a.dtype), a.shape({a.tokens, a.heads}), a.d_lse))),
        d_q(forward.memory.add(
            "d_q", Buffer(device, a.dtype, a.shape({a.tokens, a.heads, a.qk_dim}), a.row_padding))),
        d_kv(forward.memory.add(
            "d_kv", sum(device, a.dtype, a.d_kv_type, a.shape({a.keys, a.qk_dim}), a.d_kv_before,
                        a.row_padding))),
        d_sink(forward.memory.add("d_sink", a.sink.empty() ? Buffer()
                                                           : sum(device, a.dtype, DType::f32,
                                                                 {a.heads}, a.d_sink_before))),
        args(forward.memory.arguments<SparseAttentionBackward>()) {
    forward.out.upload(outputs.out);
    forward.lse.upload(outputs.lse);
    args.scale = a.scale;
    args.max_heads_per_pass = a.max_heads_per_pass;
  }

  AttentionGradients gradients() const {
    expect_canaries_intact(forward.memory);
    return {d_q.download(), d_kv.download(), d_sink.download()};
  }

  AttentionForwardWork forward;
  Buffer &d_out, &d_lse, &d_q, &d_kv, &d_sink;
  SparseAttentionBackward args;
};

inline AttentionOutputs forward(const Attention& a, const Execution& execution) {
  const AttentionForwardWork work(a, harness::device_of(execution.backend));
  run_where_taken(work.args, execution);
  return work.outputs();
}

inline AttentionGradients backward(const Attention& a, const AttentionOutputs& outputs,
                                   const Execution& execution) {
  const AttentionBackwardWork work(a, outputs, harness::device_of(execution.backend));
  run_where_taken(work.args, execution);
  return work.gradients();
}

/// The target of index_target for the slots of `a`, whose indices are relative to key_offset; added
/// to `before`, unless that is empty.
inline Values target_of(const Attention& a, const Values& lse, const Execution& execution,
                        std::int32_t key_offset = 0, const Values& before = {}) {
  const Device device = harness::device_of(execution.backend);
  AttentionForwardWork work(a, device);
  work.lse.upload(lse);
  Buffer& target = work.memory.add(
      "target", Buffer(device, type_of_sums(a.dtype), {a.tokens, a.topk}, a.row_padding));
  if (!before.empty()) target.upload(before);
  auto args = work.memory.arguments<IndexTarget>();
  args.scale = static_cast<float>(a.scale_or_default());
  args.key_offset = key_offset;
  args.accumulate = !before.empty();
  run_where_taken(args, execution);
  expect_canaries_intact(work.memory);
  return target.download();
}

inline AttentionGradients forward_backward(const Attention& a, const Execution& execution) {
  return backward(a, forward(a, execution), execution);
}

/// The formulas of the header in double, on the stored (rounded) values.
inline AttentionOutputs plain_attention(const Attention& a) {
  const Values q = as_stored(a.dtype, a.q);
  const Values kv = as_stored(a.dtype, a.kv);
  AttentionOutputs result;
  for (std::int64_t row = 0; row < a.rows() * a.heads; ++row) {
    const std::int64_t t = row / a.heads;
    const std::int64_t first_key = t / a.tokens * a.keys;
    const std::int64_t count = a.lengths.empty() ? a.topk : a.lengths[t];
    Values scores;
    Values out(static_cast<std::size_t>(a.v_dim));
    Values sums(out.size());
    double sum = 0;
    double largest = -kInfinity;
    std::vector<const double*> rows;
    for (std::int64_t j = 0; j < count; ++j) {
      const std::int64_t key = a.indices[t * a.topk + j];
      if (key < 0 || key >= a.keys) continue;
      rows.push_back(&kv[(first_key + key) * a.qk_dim]);
      double dot = 0;
      for (std::int64_t d = 0; d < a.qk_dim; ++d) dot += q[row * a.qk_dim + d] * rows.back()[d];
      scores.push_back(a.scale_or_default() * dot);
      largest = std::max(largest, scores.back());
    }
    for (const double score : scores) sum += std::exp(score - largest);
    const double lse = scores.empty() ? -kInfinity : largest + std::log(sum);
    const double sink =
        a.sink.empty() ? -kInfinity : harness::rounded(DType::f32, a.sink[row % a.heads]);
    for (std::size_t j = 0; j < scores.size(); ++j) {
      // Not from lse, in which the sum is lost where the scores are large.
      const double p = std::exp(scores[j] - largest) / (sum + std::exp(sink - largest));
      for (std::int64_t d = 0; d < a.v_dim; ++d) {
        out[d] += p * rows[j][d];
        sums[d] += p * std::fabs(rows[j][d]);
      }
    }
    result.out.insert(result.out.end(), out.begin(), out.end());
    result.sums.insert(result.sums.end(), sums.begin(), sums.end());
    result.lse.push_back(lse);
    result.max_logits.push_back(largest);
  }
  return result;
}

/// Gradients of the formulas in double, on the stored values.
inline AttentionGradients gradients_in_double(const Attention& a) {
  Attention exact = a;
  exact.dtype = DType::f64;
  exact.scale = static_cast<float>(a.scale_or_default());
  exact.q = as_stored(a.dtype, a.q);
  exact.kv = as_stored(a.dtype, a.kv);
  exact.d_out = as_stored(a.dtype, a.d_out);
  exact.d_lse = as_stored(DType::f32, a.d_lse);
  return forward_backward(exact, on(Backend::reference));
}

/// The sums that make up the gradients, over the magnitudes of their terms, those of dP and delta
/// included: what rounding errors are measured by where terms cancel.
inline AttentionGradients gradient_magnitudes(const Attention& a) {
  const AttentionOutputs outputs = plain_attention(a);
  const Values q = as_stored(a.dtype, a.q);
  const Values kv = as_stored(a.dtype, a.kv);
  const Values d_out = as_stored(a.dtype, a.d_out);
  AttentionGradients sums = {Values(q.size()), Values(kv.size()), Values(a.sink.size())};
  const double scale = std::abs(a.scale_or_default());
  for (std::int64_t row = 0; row < a.rows() * a.heads; ++row) {
    const std::int64_t t = row / a.heads;
    const std::int64_t first_key = t / a.tokens * a.keys;
    const std::int64_t count = a.lengths.empty() ? a.topk : a.lengths[t];
    const double sink =
        a.sink.empty() ? -kInfinity : harness::rounded(DType::f32, a.sink[row % a.heads]);
    const double lse = outputs.lse[row];
    const double* const d_out_row = &d_out[row * a.v_dim];
    double delta = 0;
    for (std::int64_t d = 0; d < a.v_dim; ++d)
      delta += std::fabs(outputs.out[row * a.v_dim + d] * d_out_row[d]);
    bool has_keys = false;
    for (std::int64_t j = 0; j < count; ++j) {
      const std::int64_t key = a.indices[t * a.topk + j];
      if (key < 0 || key >= a.keys) continue;
      has_keys = true;
      const double* const q_row = &q[row * a.qk_dim];
      const double* const key_row = &kv[(first_key + key) * a.qk_dim];
      double s = 0;
      for (std::int64_t d = 0; d < a.qk_dim; ++d) s += q_row[d] * key_row[d];
      const double p_of_keys = std::exp(a.scale_or_default() * s - lse);
      const double p = p_of_keys / (1 + std::exp(sink - lse));
      double dS = delta * p;
      for (std::int64_t d = 0; d < a.v_dim; ++d) dS += p * std::fabs(d_out_row[d] * key_row[d]);
      if (!a.d_lse.empty()) dS += p_of_keys * std::fabs(a.d_lse[row]);
      for (std::int64_t d = 0; d < a.qk_dim; ++d) {
        sums.d_q[row * a.qk_dim + d] += scale * dS * std::fabs(key_row[d]);
        sums.d_kv[(first_key + key) * a.qk_dim + d] +=
            scale * dS * std::fabs(q_row[d]) + (d < a.v_dim ? p * std::fabs(d_out_row[d]) : 0);
      }
    }
    if (has_keys && !a.sink.empty() && !std::isinf(sink))
      sums.d_sink[row % a.heads] += delta / (1 + std::exp(lse - sink));
  }
  return sums;
}

/// Compares outputs within the tolerances of the harness.
inline void expect_close(const Attention& a, const AttentionOutputs& actual,
                         const AttentionOutputs& expected) {
  const Values sums = expected.sums.empty() ? plain_attention(a).sums : expected.sums;
  EXPECT_TRUE(ok(compare("out", actual.out, expected.out, harness::output_limit(a.dtype),
                         harness::output_units(a.dtype, expected.out, sums))));
  EXPECT_TRUE(ok(compare("lse", actual.lse, expected.lse, harness::lse_limit(a.dtype),
                         harness::at_least_one(expected.lse))));
  EXPECT_TRUE(ok(compare("max_logits", actual.max_logits, expected.max_logits,
                         harness::lse_limit(a.dtype), harness::at_least_one(expected.max_logits))));
}

inline void expect_close(const Attention& a, const AttentionGradients& actual,
                         const AttentionGradients& expected) {
  const harness::Limit limit = harness::gradient_limit(a.dtype);
  EXPECT_TRUE(ok(compare("d_q", actual.d_q, expected.d_q, limit)));
  EXPECT_TRUE(ok(compare("d_kv", actual.d_kv, expected.d_kv, limit)));
  EXPECT_TRUE(ok(compare("d_sink", actual.d_sink, expected.d_sink, limit)));
}

/// ||actual - expected|| in units of ||magnitudes||.
inline double error_in_magnitudes(const Values& actual, const Values& expected,
                                  const Values& magnitudes) {
  double error = 0;
  double norm = 0;
  for (std::size_t i = 0; i < actual.size(); ++i) {
    error += std::pow(actual[i] - expected[i], 2);
    norm += std::pow(magnitudes[i], 2);
  }
  return error == 0 ? 0 : std::sqrt(error / norm);
}

/// Compares gradients whose terms may cancel.
inline void expect_within_magnitudes(const Attention& a, const AttentionGradients& actual,
                                     const AttentionGradients& expected) {
  const double limit = harness::gradient_limit(a.dtype).value;
  const AttentionGradients sums = gradient_magnitudes(a);
  EXPECT_LE(error_in_magnitudes(actual.d_q, expected.d_q, sums.d_q), limit);
  EXPECT_LE(error_in_magnitudes(actual.d_kv, expected.d_kv, sums.d_kv), limit);
  EXPECT_LE(error_in_magnitudes(actual.d_sink, expected.d_sink, sums.d_sink), limit);
}

inline void expect_same_bits(const AttentionOutputs& actual, const AttentionOutputs& expected) {
  EXPECT_TRUE(same_bits(actual.out, expected.out));
  EXPECT_TRUE(same_bits(actual.lse, expected.lse));
  EXPECT_TRUE(same_bits(actual.max_logits, expected.max_logits));
}

inline void expect_same_bits(const AttentionGradients& actual, const AttentionGradients& expected) {
  EXPECT_TRUE(same_bits(actual.d_q, expected.d_q));
  EXPECT_TRUE(same_bits(actual.d_kv, expected.d_kv));
  EXPECT_TRUE(same_bits(actual.d_sink, expected.d_sink));
}

/// Shapes on which properties are tested: an odd one, and those of the models, whole or with the
/// heads of one rank, for which backends may have specialised kernels. Under sanitizers, where
/// there are none, with fewer heads.
inline std::vector<Attention> attention_shapes(Backend backend) {
  std::vector<Attention> shapes = {{}, {.dtype = DType::f32}};
  if (backend == Backend::reference) return shapes;  // it has a single kernel
  shapes.push_back({.tokens = 5,
                    .keys = 300,
                    .heads = kSanitized ? 20 : 64,
                    .qk_dim = 576,
                    .v_dim = 512,
                    .topk = 128,
                    .scale = 0.0625F});
  shapes.push_back({.tokens = 5,
                    .keys = 300,
                    .heads = kSanitized ? 36 : 128,
                    .qk_dim = 512,
                    .v_dim = 512,
                    .topk = 160,
                    .scale = 0});
  shapes.push_back({.tokens = 5,
                    .keys = 300,
                    .heads = 11,
                    .qk_dim = 576,
                    .v_dim = 512,
                    .topk = 200,
                    .scale = 0.0625F});
  // So many rows that a thread block of a GPU has several.
  if (backend == Backend::cuda) {
    shapes.push_back({.tokens = 600,
                      .keys = 300,
                      .heads = 9,
                      .qk_dim = 512,
                      .v_dim = 512,
                      .topk = 150,
                      .scale = 0});
  }
  return shapes;
}

/// Calls body(attention) for the shapes, with and without a sink, whose call forward takes.
template <class Body>
void on_each_shape(std::uint64_t seed, const Execution& execution, const Body& body) {
  for (const Attention& shape : attention_shapes(execution.backend)) {
    const Attention a = filled(shape, seed);
    const AttentionForwardWork work(a, harness::device_of(execution.backend));
    if (!is_taken(work.args, execution)) continue;
    const ::testing::ScopedTrace trace(
        __FILE__, __LINE__,
        fmt::format("{}, {} heads, qk_dim {}", name(a.dtype), a.heads, a.qk_dim));
    body(a);
    const ::testing::ScopedTrace sink_trace(__FILE__, __LINE__, "with a sink");
    body(with_sink(a, seed));
  }
}

/// Calls body(backend, attention) for every backend and shape.
template <class Body>
void on_each_attention(std::uint64_t seed, const Body& body) {
  on_each_backend([&](Backend backend) {
    on_each_shape(seed, on(backend), [&](const Attention& a) { body(backend, a); });
  });
}

/// Calls body(execution, attention) for every kernel and the shapes that it takes.
template <class Body>
void on_each_attention_kernel(std::uint64_t seed, const Body& body) {
  on_each_kernel("sparse_attention", [&](const Execution& execution) {
    on_each_shape(seed, execution, [&](const Attention& a) { body(execution, a); });
  });
}

}  // namespace winnow::tests
