// SPDX-License-Identifier: Apache-2.0
// Every backward against central differences of its forward, in double on the reference backend.
#include <cmath>
#include <functional>

#include "tests/attention_calls.h"
#include "tests/dense_loss_calls.h"
#include "tests/indexer_calls.h"

namespace winnow::tests {
namespace {

constexpr double kRelativeError = 1e-7;

const Execution kReference{.backend = Backend::reference, .threads = 1};

double product(const Values& a, const Values& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i)
    if (b[i] != 0) sum += a[i] * b[i];  // d_lse is 0 where lse is -inf, in rows without keys
  return sum;
}

/// The gradient of f with respect to `x`, which f reads.
Values differences(Values& x, const std::function<double()>& f) {
  Values gradient;
  for (double& element : x) {
    const double at = element;
    // Two step sizes, combined (Richardson) to an error of fourth order.
    const auto slope = [&](double step) {
      element = at + step;
      const double above = f();
      element = at - step;
      const double below = f();
      element = at;
      return (above - below) / (2 * step);
    };
    gradient.push_back((4 * slope(2e-4) - slope(4e-4)) / 3);
  }
  return gradient;
}

void expect_gradient(const char* what, const Values& gradient, Values& x,
                     const std::function<double()>& f) {
  const Values expected = differences(x, f);
  // All-zero gradients must not pass.
  EXPECT_GT(product(expected, expected), 0) << what;
  EXPECT_TRUE(ok(compare(what, gradient, expected, {kRelativeError, true, true})));
}

// ---- sparse_attention.

struct AttentionCase {
  const char* name;
  bool through_out, through_lse, sink, holes;
};

class SparseAttentionGradients : public ::testing::TestWithParam<AttentionCase> {
 protected:
  SparseAttentionGradients() {
    a = filled({.tokens = 4,
                .keys = 7,
                .heads = 2,
                .qk_dim = 16,
                .v_dim = 8,
                .topk = 5,
                .dtype = DType::f64,
                .scale = 0.3F},
               1);
    if (GetParam().sink) a.sink = {0.7, -0.4};
    if (!GetParam().through_out) a.d_out.assign(a.d_out.size(), 0);
    if (!GetParam().through_lse) a.d_lse.assign(a.d_lse.size(), 0);
    if (GetParam().holes) {
      a.indices[0] = -1;
      a.indices[6] = 99;
      a.indices[11] = a.indices[10];  // a key that counts twice
      for (std::int64_t j = 0; j < a.topk; ++j) a.indices[3 * a.topk + j] = -1;
      a.lengths = {5, 4, 3, 5};
      // Rows without keys do not contribute to the loss.
      std::fill(a.d_out.begin() + 3 * a.heads * a.v_dim, a.d_out.end(), 0);
      std::fill(a.d_lse.begin() + 3 * a.heads, a.d_lse.end(), 0);
    }
  }

  double loss() const {
    const AttentionOutputs outputs = forward(a, kReference);
    return product(outputs.out, a.d_out) + product(outputs.lse, a.d_lse);
  }

  Attention a;
};

TEST_P(SparseAttentionGradients, AreTheDerivatives) {
  const AttentionGradients gradients = forward_backward(a, kReference);
  const auto f = [this] { return loss(); };
  expect_gradient("d_q", gradients.d_q, a.q, f);
  expect_gradient("d_kv", gradients.d_kv, a.kv, f);
  if (GetParam().sink && GetParam().through_out)
    expect_gradient("d_sink", gradients.d_sink, a.sink, f);
  if (GetParam().sink && !GetParam().through_out) {
    EXPECT_TRUE(all_zero(gradients.d_sink));  // lse does not depend on the sink
  }
}

INSTANTIATE_TEST_SUITE_P(Paths, SparseAttentionGradients,
                         ::testing::Values(AttentionCase{"Out", true, false, false, false},
                                           AttentionCase{"OutWithSink", true, false, true, false},
                                           AttentionCase{"Lse", false, true, false, false},
                                           AttentionCase{"LseWithSink", false, true, true, false},
                                           AttentionCase{"Both", true, true, true, false},
                                           AttentionCase{"BothWithHoles", true, true, true, true}),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(SparseAttentionGradients, OfAllChannelsAsValuesAreTheDerivatives) {
  Attention a = filled({.tokens = 3,
                        .keys = 6,
                        .heads = 2,
                        .qk_dim = 16,
                        .v_dim = 16,
                        .topk = 4,
                        .dtype = DType::f64,
                        .scale = 0},
                       2);
  a.sink = {0.2, 1.5};
  const AttentionGradients gradients = forward_backward(a, kReference);
  const auto f = [&] {
    const AttentionOutputs outputs = forward(a, kReference);
    return product(outputs.out, a.d_out) + product(outputs.lse, a.d_lse);
  };
  expect_gradient("d_q", gradients.d_q, a.q, f);
  expect_gradient("d_kv", gradients.d_kv, a.kv, f);
  expect_gradient("d_sink", gradients.d_sink, a.sink, f);
}

TEST(SparseAttentionGradients, OfABatchAreTheDerivatives) {
  Attention a = filled({.batch = 2,
                        .tokens = 2,
                        .keys = 4,
                        .heads = 2,
                        .qk_dim = 8,
                        .v_dim = 8,
                        .topk = 3,
                        .dtype = DType::f64,
                        .scale = 0.5F},
                       3);
  a.sink = {0.2, 1.5};
  const AttentionGradients gradients = forward_backward(a, kReference);
  const auto f = [&] {
    const AttentionOutputs outputs = forward(a, kReference);
    return product(outputs.out, a.d_out) + product(outputs.lse, a.d_lse);
  };
  expect_gradient("d_q", gradients.d_q, a.q, f);
  expect_gradient("d_kv", gradients.d_kv, a.kv, f);
  expect_gradient("d_sink", gradients.d_sink, a.sink, f);
}

// ---- index_topk.

TEST(IndexTopkGradients, AreTheDerivatives) {
  Indexer ix =
      filled({.tokens = 4, .keys = 9, .heads = 3, .dim = 8, .topk = 5, .dtype = DType::f64}, 4);
  ix.begin = {0, 2, 0, 0};
  ix.end = {9, 6, 3, 0};
  ix.indices = {4, 8, 0, 0, -1, 2, 5, 1, 6, 3, 0, 1, 2, 3, 99, 0, 1, 2, 3, 4};
  ix.lengths = {5, 5, 2, 5};
  const IndexGradients gradients = backward(ix, kReference);
  const auto f = [&] {
    const Values scores = replay(ix, kReference);
    double sum = 0;
    for (std::size_t i = 0; i < scores.size(); ++i)
      if (scores[i] != -kInfinity) sum += scores[i] * ix.d_scores[i];
    return sum;
  };
  expect_gradient("d_q", gradients.d_q, ix.q, f);
  expect_gradient("d_k", gradients.d_k, ix.k, f);
  expect_gradient("d_weights", gradients.d_weights, ix.weights, f);
}

// ---- value_projection.

TEST(ValueProjectionGradients, AreTheDerivatives) {
  const std::int64_t tokens = 3, heads = 2, head_dim = 5, v_dim = 8;
  Values out = normals(tokens * heads * v_dim, 5, "out");
  Values w_v = normals(heads * head_dim * v_dim, 5, "w_v");
  const Values d_out_v = normals(tokens * heads * head_dim, 5, "d_out_v");
  const Shape out_shape = {tokens, heads, v_dim};
  const Shape w_shape = {heads, head_dim, v_dim};
  const Shape out_v_shape = {tokens, heads, head_dim};

  const Buffer d_out({}, DType::f64, out_shape);
  const Buffer d_w_v = floats({}, DType::f64, w_shape, Values(w_v.size()));
  const Buffer out_tensor = floats({}, DType::f64, out_shape, out);
  const Buffer w_tensor = floats({}, DType::f64, w_shape, w_v);
  const Buffer d_out_v_tensor = floats({}, DType::f64, out_v_shape, d_out_v);
  value_projection_backward({.out = out_tensor.tensor(),
                             .w_v = w_tensor.tensor(),
                             .d_out_v = d_out_v_tensor.tensor(),
                             .d_out = d_out.tensor(),
                             .d_w_v = d_w_v.tensor()},
                            kReference);
  const auto f = [&] {
    const Buffer x = floats({}, DType::f64, out_shape, out);
    const Buffer w = floats({}, DType::f64, w_shape, w_v);
    const Buffer out_v({}, DType::f64, out_v_shape);
    value_projection_forward({.out = x.tensor(), .w_v = w.tensor(), .out_v = out_v.tensor()},
                             kReference);
    return product(out_v.download(), d_out_v);
  };
  expect_gradient("d_out", d_out.download(), out, f);
  expect_gradient("d_w_v", d_w_v.download(), w_v, f);
}

// ---- index_loss.

TEST(IndexLossGradients, AreTheDerivatives) {
  const std::int64_t tokens = 3, topk = 6;
  Values scores = normals(tokens * topk, 6, "scores");
  Values target(static_cast<std::size_t>(tokens * topk));
  for (std::size_t i = 0; i < target.size(); ++i)
    target[i] = Random(6, "target").uniform(static_cast<std::int64_t>(i));
  target[2] = 0;
  const Buffer indices =
      ints({}, {tokens, topk}, {0, 1, 2, 3, 4, 5, 3, -1, 9, 9, 7, -1, 5, 4, 3, 2, 1, 0});
  const Buffer lengths = ints({}, {tokens}, {6, 5, 4});
  const Buffer target_tensor = floats({}, DType::f64, {tokens, topk}, target);
  const auto run = [&] {
    const Buffer loss({}, DType::f64, {tokens});
    const Buffer d_scores({}, DType::f64, {tokens, topk});
    const Buffer scores_tensor = floats({}, DType::f64, {tokens, topk}, scores);
    index_loss({.indices = indices.tensor(),
                .lengths = lengths.tensor(),
                .scores = scores_tensor.tensor(),
                .target = target_tensor.tensor(),
                .loss = loss.tensor(),
                .d_scores = d_scores.tensor()},
               kReference);
    return std::pair{loss.download(), d_scores.download()};
  };
  expect_gradient("d_scores", run().second, scores, [&] {
    const Values loss = run().first;
    return loss[0] + loss[1] + loss[2];
  });
}

// ---- dense_index_loss.

TEST(DenseIndexLossGradients, AreTheDerivatives) {
  for (const bool sink : {false, true}) {
    DenseLoss d = filled({.tokens = 4,
                          .keys = 9,
                          .index_keys = 7,
                          .key_offset = 2,
                          .heads = 2,
                          .qk_dim = 8,
                          .index_heads = 2,
                          .index_dim = 8,
                          .dtype = DType::f64},
                         7);
    if (sink) d.sink = {0.3, -1};
    const DenseLossGradients gradients = backward(d, forward(d, kReference).lse, kReference);
    const auto f = [&] { return product(forward(d, kReference).loss, d.d_loss); };
    expect_gradient("d_index_q", gradients.d_index_q, d.index_q, f);
    expect_gradient("d_weights", gradients.d_weights, d.weights, f);
    expect_gradient("d_index_k", gradients.d_index_k, d.index_k, f);
  }
}

}  // namespace
}  // namespace winnow::tests
