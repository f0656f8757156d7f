// SPDX-License-Identifier: Apache-2.0
// Deterministic sums of sparse_attention's backward: the same bits in every run, and as precise as
// others where terms differ much in size.
#include "tests/attention_calls.h"

namespace winnow::tests {
namespace {

/// Every row names all keys but a few, and key 7 first.
Attention many_rows(std::int64_t qk_dim, DType dtype, std::uint64_t seed) {
  Attention a = filled({.tokens = 120,
                        .keys = 40,
                        .heads = 3,
                        .qk_dim = qk_dim,
                        .v_dim = qk_dim == 24 ? 16 : 512,
                        .topk = 33,
                        .dtype = dtype,
                        .scale = 0.0625F},
                       seed);
  for (std::int64_t t = 0; t < a.tokens; ++t) {
    const auto row = a.indices.begin() + t * a.topk;
    std::iter_swap(row, std::find(row, row + a.topk - 1, 7));
    *row = 7;
  }
  return a;
}

/// Calls body(execution, attention) for every kernel and the shapes and types that it takes.
template <class Body>
void on_many_rows(std::uint64_t seed, const Body& body) {
  on_each_kernel("sparse_attention", [&](const Execution& execution) {
    for (const std::int64_t qk_dim : {24, 576, 512}) {
      if (qk_dim != 24 && execution.backend == Backend::reference) continue;
      for (const DType dtype : {DType::bf16, DType::f16}) {
        const Attention a = many_rows(qk_dim, dtype, seed);
        const AttentionForwardWork work(a, harness::device_of(execution.backend));
        if (!is_taken(work.args, execution)) continue;
        SCOPED_TRACE(fmt::format("{}, qk_dim {}", name(dtype), qk_dim));
        body(deterministic(execution), a);
      }
    }
  });
}

void expect_precise_and_repeatable(const Attention& a, const Execution& execution) {
  const AttentionOutputs outputs = forward(a, execution);
  const AttentionGradients gradients = backward(a, outputs, execution);
  expect_within_magnitudes(a, gradients, gradients_in_double(a));
  for (int i = 0; i < 3; ++i) expect_same_bits(backward(a, outputs, execution), gradients);
}

TEST(SparseAttentionDeterministic, AKeyMayHaveOneLargeWeightAmongManySmallOnes) {
  on_many_rows(61, [](const Execution& execution, const Attention& whole) {
    // Channel 0 of q decides about key 7: row 5 gives it nearly all of its weight, others 1e-6.
    Attention a = whole;
    for (std::int64_t s = 0; s < a.keys; ++s) a.kv[s * a.qk_dim] = s == 7 ? 16 : 0;
    for (std::int64_t row = 0; row < a.rows() * a.heads; ++row)
      a.q[row * a.qk_dim] = row / a.heads == 5 ? 24 : -10;
    expect_precise_and_repeatable(a, execution);
  });
}

TEST(SparseAttentionDeterministic, ChannelsMayDifferInSize) {
  on_many_rows(62, [](const Execution& execution, const Attention& whole) {
    Attention a = whole;
    const double range = a.dtype == DType::f16 ? 1e3 : 1e6;
    for (std::size_t i = 0; i < a.d_out.size(); ++i) {
      const std::int64_t d = static_cast<std::int64_t>(i) % a.v_dim;
      a.d_out[i] *= std::pow(range, static_cast<double>(d) / static_cast<double>(a.v_dim) - 0.5);
    }
    expect_precise_and_repeatable(a, execution);
  });
}

TEST(SparseAttentionDeterministic, RowsMayDifferInSize) {
  on_many_rows(63, [](const Execution& execution, const Attention& whole) {
    Attention a = whole;
    const double range = a.dtype == DType::f16 ? 1e3 : 1e20;
    const std::int64_t row = a.heads * a.v_dim;
    a.d_lse.clear();
    for (std::size_t i = 0; i < a.d_out.size(); ++i) {
      const auto t = static_cast<double>(static_cast<std::int64_t>(i) / row);
      a.d_out[i] *= std::pow(range, t / static_cast<double>(a.tokens) - 0.5);
    }
    expect_precise_and_repeatable(a, execution);
  });
}

TEST(SparseAttentionDeterministic, GradientsMayBeTinyOrHuge) {
  on_many_rows(64, [](const Execution& execution, const Attention& whole) {
    if (whole.dtype == DType::f16) return;
    for (const double size : {1e-35, 1e-25, 1e25, 1e33}) {
      SCOPED_TRACE(size);
      Attention a = whole;
      a.d_lse.clear();
      for (double& value : a.d_out) value *= size;
      const AttentionOutputs outputs = forward(a, execution);
      const AttentionGradients gradients = backward(a, outputs, execution);
      expect_same_bits(backward(a, outputs, execution), gradients);
      const AttentionGradients expected = gradients_in_double(a);
      const Values magnitudes = gradient_magnitudes(a).d_kv;
      EXPECT_LE(error_in_magnitudes(gradients.d_kv, expected.d_kv, magnitudes),
                harness::gradient_limit(a.dtype).value);
    }
  });
}

TEST(SparseAttentionDeterministic, WhatIsNotFiniteStaysWithItsKeysAndRepeats) {
  on_many_rows(65, [](const Execution& execution, const Attention& whole) {
    Attention a = whole;
    // Key 9 stands only in rows that are spoilt.
    for (std::int64_t i = 0; i < a.rows() * a.topk; ++i)
      if (a.indices[i] != 7 && i / a.topk % 50 == 0) a.indices[i] = 9;
    for (std::int64_t i = 0; i < a.rows() * a.topk; ++i)
      if (a.indices[i] == 9 && i / a.topk % 50 != 0) a.indices[i] = -1;
    for (std::int64_t t = 0; t < a.tokens; t += 50)
      a.d_out[t * a.heads * a.v_dim + 3] = t == 0 ? kNaN : kInfinity;
    const AttentionOutputs outputs = forward(a, execution);
    const AttentionGradients gradients = backward(a, outputs, execution);
    for (int i = 0; i < 3; ++i)
      EXPECT_TRUE(same_bits(backward(a, outputs, execution).d_kv, gradients.d_kv));
    for (std::int64_t s = 0; s < a.keys; ++s) {
      const Values row = part(gradients.d_kv, s * a.qk_dim, a.qk_dim);
      const bool is_finite =
          std::all_of(row.begin(), row.end(), [](double value) { return std::isfinite(value); });
      EXPECT_EQ(is_finite, s != 7 && s != 9) << s;
    }
  });
}

// More rows than a GPU has multiprocessors, several blocks of keys each, two groups of heads.
TEST(SparseAttentionDeterministic, RowsOfSeveralBlocksRepeat) {
  on_each_kernel("sparse_attention", [](const Execution& execution) {
    if (execution.backend == Backend::reference) return;
    for (const std::int64_t qk_dim : {576, 512}) {
      const Attention a = filled({.tokens = 140,
                                  .keys = 200,
                                  .heads = 70,
                                  .qk_dim = qk_dim,
                                  .v_dim = 512,
                                  .topk = 150,
                                  .scale = 0.0625F},
                                 68);
      const AttentionForwardWork work(a, harness::device_of(execution.backend));
      if (!is_taken(work.args, execution)) continue;
      const AttentionOutputs outputs = forward(a, execution);
      const AttentionGradients gradients = backward(a, outputs, deterministic(execution));
      expect_same_bits(backward(a, outputs, deterministic(execution)), gradients);
      expect_close(a, gradients, backward(a, outputs, execution));
    }
  });
}

// Rows without keys change which thread block takes a row, and when.
TEST(SparseAttentionDeterministic, OnCudaRowsWithoutKeysChangeNoBit) {
  if (!has_cuda()) GTEST_SKIP();
  for (const std::int64_t qk_dim : {24, 576, 512}) {
    Attention a = with_sink(many_rows(qk_dim, DType::bf16, 66), 66);
    a.d_lse.clear();
    const Execution execution = deterministic(on(Backend::cuda));
    const AttentionGradients expected = forward_backward(a, execution);
    for (const std::int64_t apart : {1, 3, 7}) {
      Attention more = a;
      more.q.clear();
      more.d_out.clear();
      more.indices.clear();
      const auto append = [](auto& to, const auto& from, std::int64_t first, std::int64_t count) {
        to.insert(to.end(), from.begin() + first, from.begin() + first + count);
      };
      for (std::int64_t t = 0; t < a.tokens; ++t) {
        for (int copy = 0; copy < (t % apart == 0 ? 2 : 1); ++copy) {
          append(more.q, a.q, t * a.heads * a.qk_dim, a.heads * a.qk_dim);
          append(more.d_out, a.d_out, t * a.heads * a.v_dim, a.heads * a.v_dim);
          if (copy == 0) append(more.indices, a.indices, t * a.topk, a.topk);
          if (copy == 1) more.indices.insert(more.indices.end(), a.topk, -1);
        }
      }
      more.tokens = static_cast<std::int64_t>(more.indices.size()) / a.topk;
      EXPECT_TRUE(same_bits(forward_backward(more, execution).d_kv, expected.d_kv)) << apart;
    }
  }
}

TEST(SparseAttentionDeterministic, SumsOfManyRowsAreRight) {
  on_each_backend([](Backend backend) {
    if (backend == Backend::reference) return;  // it is what others are compared with
    Attention a = filled({.tokens = 16500,
                          .keys = 6,
                          .heads = 1,
                          .qk_dim = 512,
                          .v_dim = 512,
                          .topk = 2,
                          .scale = 0},
                         67);
    for (const DType d_kv_type : {DType::f32, DType::bf16}) {
      a.d_kv_type = d_kv_type;
      const AttentionOutputs outputs = forward(a, on(backend));
      const AttentionGradients gradients = backward(a, outputs, deterministic(on(backend)));
      expect_same_bits(backward(a, outputs, deterministic(on(backend))), gradients);
      expect_close(a, gradients, backward(a, outputs, on(backend)));
    }
  });
}

}  // namespace
}  // namespace winnow::tests
