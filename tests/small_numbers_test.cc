// SPDX-License-Identifier: Apache-2.0
// Numbers of bf16 near the ends of its range, denormals above all: inputs, products and what is
// rounded to bf16 on the way count like any others, though some instructions take denormals for 0.
#include <cmath>

#include "tests/attention_calls.h"
#include "tests/indexer_calls.h"

namespace winnow::tests {
namespace {

/// Calls body(execution, attention) for every kernel, with an odd shape and one of the models'.
template <class Body>
void on_each_kernel_in_bf16(std::uint64_t seed, const Body& body) {
  on_each_kernel("sparse_attention", [&](const Execution& execution) {
    for (const Attention& shape :
         {Attention{},
          Attention{
              .tokens = 4, .keys = 160, .heads = 5, .qk_dim = 576, .v_dim = 512, .topk = 130}}) {
      const Attention a = filled(shape, seed);
      const AttentionForwardWork work(a, harness::device_of(execution.backend));
      if (!is_taken(work.args, execution)) continue;
      SCOPED_TRACE(fmt::format("qk_dim {}", a.qk_dim));
      body(execution, a);
    }
  });
}

void scale_rows(Values& values, std::int64_t row_size, std::int64_t first, std::int64_t step,
                int exponent) {
  for (std::size_t row = first; row * row_size < values.size(); row += step) {
    for (std::int64_t d = 0; d < row_size; ++d) {
      double& value = values[row * row_size + d];
      value = std::ldexp(value, exponent);
    }
  }
}

/// The oracle sees the numbers that bf16 can hold.
Attention stored(Attention a) {
  for (Values* values : {&a.q, &a.kv, &a.d_out}) *values = as_stored(a.dtype, *values);
  return a;
}

/// Denormal keys with logits of the usual size.
Attention with_denormal_keys(Attention a) {
  scale_rows(a.kv, a.qk_dim, 0, 1, -130);
  scale_rows(a.q, a.qk_dim, 0, 1, 40);
  a.scale = static_cast<float>(std::ldexp(a.scale_or_default(), 90));
  return stored(a);
}

/// The same of queries.
Attention with_denormal_queries(Attention a) {
  scale_rows(a.q, a.qk_dim, 0, 1, -130);
  scale_rows(a.kv, a.qk_dim, 0, 1, 40);
  a.scale = static_cast<float>(std::ldexp(a.scale_or_default(), 90));
  return stored(a);
}

/// Normal keys and queries, of which about half of the products are denormal, with logits of the
/// usual size.
Attention with_denormal_products(Attention a) {
  scale_rows(a.kv, a.qk_dim, 0, 1, -62);
  scale_rows(a.q, a.qk_dim, 0, 1, -64);
  a.scale = static_cast<float>(std::ldexp(a.scale_or_default(), 126));
  return stored(a);
}

TEST(SmallNumbers, MakeTheLogitsThatTheyShould) {
  on_each_kernel_in_bf16(1, [](const Execution& execution, const Attention& whole) {
    for (const Attention& a :
         {with_denormal_keys(whole), with_denormal_queries(whole), with_denormal_products(whole)}) {
      // Not `out`: of denormal keys it is denormal itself.
      const AttentionOutputs outputs = forward(a, execution);
      const AttentionOutputs expected = plain_attention(a);
      EXPECT_TRUE(ok(compare("lse", outputs.lse, expected.lse, harness::lse_limit(a.dtype),
                             harness::at_least_one(expected.lse))));
      EXPECT_TRUE(
          ok(compare("max_logits", outputs.max_logits, expected.max_logits,
                     harness::lse_limit(a.dtype), harness::at_least_one(expected.max_logits))));
    }
  });
}

TEST(SmallNumbers, MakeTheTargetsThatTheyShould) {
  on_each_kernel("index_target", [](const Execution& execution) {
    for (const Attention& shape :
         {Attention{},
          Attention{
              .tokens = 4, .keys = 160, .heads = 5, .qk_dim = 576, .v_dim = 512, .topk = 130}}) {
      SCOPED_TRACE(fmt::format("qk_dim {}", shape.qk_dim));
      const Attention a = filled(shape, 73);
      for (const Attention& small : {with_denormal_keys(a), with_denormal_queries(a)}) {
        const Values lse = as_stored(DType::f32, plain_attention(small).lse);
        EXPECT_TRUE(ok(compare("target", target_of(small, lse, execution),
                               target_of(small, lse, on(Backend::reference)),
                               harness::target_limit(small.dtype))));
      }
    }
  });
}

TEST(SmallNumbers, OfSomeKeysLeaveTheTargetsOfTheOthers) {
  on_each_kernel("index_target", [](const Execution& execution) {
    Attention a = filled(Attention{.tokens = 3, .keys = 500, .topk = 450}, 74);
    // In ascending order some blocks of slots hold small keys, and others do not.
    for (std::int64_t t = 0; t < a.tokens; ++t) {
      const auto list = a.indices.begin() + t * a.topk;
      std::sort(list, list + a.topk);
    }
    for (std::int64_t s = 0; s < a.keys; ++s)
      for (std::int64_t d = 0; d < a.qk_dim; ++d)
        a.kv[s * a.qk_dim + d] = std::ldexp(a.kv[s * a.qk_dim + d], s / 130 == 1 ? -130 : -60);
    scale_rows(a.q, a.qk_dim, 0, 1, 60);
    const Attention small = stored(a);
    const Values lse = as_stored(DType::f32, plain_attention(small).lse);
    EXPECT_TRUE(ok(compare("target", target_of(small, lse, execution),
                           target_of(small, lse, on(Backend::reference)),
                           harness::target_limit(small.dtype))));
  });
}

TEST(SmallNumbers, ValuesMayBeSmallerThanTheirProbabilitiesCanScale) {
  // Many terms of the output are denormal, their sum is not.
  on_each_kernel_in_bf16(2, [](const Execution& execution, const Attention& whole) {
    Attention a = whole;
    scale_rows(a.kv, a.qk_dim, 0, 1, -120);
    scale_rows(a.q, a.qk_dim, 0, 1, 120);
    const Attention small = stored(a);
    expect_close(small, forward(small, execution), plain_attention(small));
  });
}

TEST(SmallNumbers, ProbabilitiesMayBeFarBelowTheLargest) {
  on_each_kernel_in_bf16(9, [](const Execution& execution, const Attention& whole) {
    Attention a = whole;
    scale_rows(a.kv, a.qk_dim, 0, 1, -30);
    scale_rows(a.q, a.qk_dim, 0, 1, 30);
    a.scale = static_cast<float>(16 * a.scale_or_default());
    const Attention steep = stored(a);
    expect_close(steep, forward(steep, execution), plain_attention(steep));
  });
}

TEST(SmallNumbers, ARowDoesNotDependOnThoseOfOthers) {
  on_each_kernel_in_bf16(3, [](const Execution& execution, const Attention& whole) {
    Attention mixed = whole;
    scale_rows(mixed.kv, mixed.qk_dim, 5, 7, -60);
    scale_rows(mixed.q, mixed.heads * mixed.qk_dim, 1, 2, -60);
    const Attention a = stored(mixed);
    const AttentionOutputs outputs = forward(a, execution);
    expect_close(a, outputs, plain_attention(a));
    for (std::int64_t t = 0; t < a.tokens; ++t)
      expect_same_bits(forward(rows_of(a, t, 1), execution), rows_of(a, outputs, t, 1));
  });
}

TEST(SmallNumbers, ARowMayHaveThemInSomeBlocksOfKeys) {
  on_each_kernel_in_bf16(10, [](const Execution& execution, const Attention& whole) {
    // Of blocks of 96 keys every second one has small keys; the largest logits come last.
    Attention wide = whole;
    wide.keys = 500;
    wide.topk = 480;
    wide = filled(wide, 10);
    for (std::int64_t i = 0; i < wide.rows() * wide.topk; ++i)
      wide.indices[i] = static_cast<std::int32_t>(i % wide.topk + i / wide.topk);
    for (const std::int64_t first : {120, 310}) {
      scale_rows(wide.kv, wide.qk_dim, first, 1, -60);
      scale_rows(wide.kv, wide.qk_dim, first + 50, 1, 60);
    }
    scale_rows(wide.kv, wide.qk_dim, 450, 7, 2);
    const Attention a = stored(wide);
    const AttentionOutputs outputs = forward(a, execution);
    expect_close(a, outputs, plain_attention(a));
    for (std::int64_t t = 0; t < a.tokens; ++t)
      expect_same_bits(forward(rows_of(a, t, 1), execution), rows_of(a, outputs, t, 1));
  });
}

TEST(SmallNumbers, GradientsCountThem) {
  on_each_kernel_in_bf16(4, [](const Execution& execution, const Attention& whole) {
    Attention mixed = whole;  // rows of small queries between others
    scale_rows(mixed.q, mixed.heads * mixed.qk_dim, 1, 2, -60);
    Attention small_d_out = whole;
    scale_rows(small_d_out.d_out, small_d_out.v_dim, 0, 1, -110);
    for (Attention a : {with_denormal_products(whole), stored(mixed), stored(small_d_out)}) {
      a.d_lse.clear();
      expect_within_magnitudes(a, forward_backward(a, execution), gradients_in_double(a));
    }
  });
}

/// The same for the kernels of the host, which multiply p and scale * dS in fp32 where bf16 does
/// not hold them. Those of CUDA round them to bf16 in every row.
template <class Body>
void on_each_host_kernel_in_bf16(std::uint64_t seed, const Body& body) {
  on_each_kernel_in_bf16(seed, [&](const Execution& execution, const Attention& whole) {
    if (harness::device_of(execution.backend).kind == DeviceKind::cpu) body(execution, whole);
  });
}

TEST(SmallNumbers, DenormalDifferencesOfNormalProductsCount) {
  // Products of 2^-112 that differ by 2^-127.
  on_each_kernel("sparse_attention", [](const Execution& execution) {
    if (harness::device_of(execution.backend).kind != DeviceKind::cpu) return;
    Attention a =
        filled({.tokens = 1, .keys = 1, .heads = 1, .qk_dim = 1024, .v_dim = 1024, .topk = 1}, 11);
    for (std::int64_t d = 0; d < a.qk_dim; ++d) {
      a.q[d] = d % 2 == 0 ? 182 * 0x1p-64 : -183 * 0x1p-64;
      a.kv[d] = d % 2 == 0 ? 184 * 0x1p-63 : 183 * 0x1p-63;
    }
    a.scale = 0x1p127F;
    const AttentionOutputs outputs = forward(a, execution);
    EXPECT_EQ(outputs.lse, Values{-512});
    EXPECT_EQ(outputs.max_logits, Values{-512});
    // The gradients are those through lse alone.
    std::fill(a.d_out.begin(), a.d_out.end(), 0);
    a.d_lse = {0x1p-70};
    expect_close(a, forward_backward(a, execution), gradients_in_double(a));
  });
}

/// Inputs far from denormal with scale * dS around 2^-135.
Attention with_denormal_dS(Attention a) {
  for (std::size_t i = 0; i < a.kv.size(); ++i)
    a.kv[i] = std::ldexp(a.kv[i], static_cast<std::int64_t>(i) % a.qk_dim < a.v_dim ? -30 : 40);
  scale_rows(a.q, a.qk_dim, 0, 1, 40);
  scale_rows(a.d_out, a.v_dim, 0, 1, -20);
  a.scale = static_cast<float>(std::ldexp(a.scale_or_default(), -80));
  return stored(a);
}

/// Probabilities around 2^-130: the sink takes the rest.
Attention with_denormal_p(Attention a) {
  scale_rows(a.d_out, a.v_dim, 0, 1, 60);
  a.sink.assign(static_cast<std::size_t>(a.heads), 90);
  return stored(a);
}

/// Rows whose dS is large enough beside those with one that is not.
Attention with_some_small_dS(Attention a) {
  scale_rows(a.q, a.qk_dim, 0, 1, 40);
  scale_rows(a.d_out, a.heads * a.v_dim, 1, 2, -50);
  a.scale = static_cast<float>(std::ldexp(a.scale_or_default(), -40));
  return stored(a);
}

TEST(SmallNumbers, GradientsCountThemOnTheWay) {
  on_each_host_kernel_in_bf16(6, [](const Execution& execution, const Attention& whole) {
    for (Attention a :
         {with_denormal_dS(whole), with_denormal_p(whole), with_some_small_dS(whole)}) {
      a.d_lse.clear();
      expect_within_magnitudes(a, forward_backward(a, execution), gradients_in_double(a));
    }
  });
}

TEST(SmallNumbers, GradientsBesideThemAreThoseOfTheRowAlone) {
  on_each_host_kernel_in_bf16(7, [](const Execution& execution, const Attention& whole) {
    const Attention a = with_some_small_dS(whole);
    const AttentionGradients expected = forward_backward(a, on_threads(1, execution));
    for (std::int64_t t = 0; t < a.tokens; ++t) {
      const Values row = part(expected.d_q, t * a.heads * a.qk_dim, a.heads * a.qk_dim);
      EXPECT_TRUE(same_bits(forward_backward(rows_of(a, t, 1), execution).d_q, row));
    }
    Execution little = on_threads(3, execution);
    little.workspace_limit = 3 << 20;
    for (const Execution& other : {on_threads(2, execution), little})
      expect_same_bits(forward_backward(a, other), expected);
  });
}

/// Two keys with p 1/2, of which dS is 2^79 and -2^79. Only the first of 8 channels of values and
/// of d_out is not 0, and q and the other channels of the keys are.
Attention with_large_dS() {
  Attention a =
      filled({.tokens = 1, .keys = 2, .heads = 1, .qk_dim = 16, .v_dim = 8, .topk = 2}, 8);
  for (Values* values : {&a.q, &a.kv, &a.d_out, &a.d_lse})
    std::fill(values->begin(), values->end(), 0);
  a.kv[0] = 0x1p-20;
  a.kv[16] = -0x1p-20;
  a.d_out[0] = 0x1p100;
  return a;
}

TEST(LargeNumbers, GradientsAreFiniteWhereBf16WouldRoundThemToInfinity) {
  on_each_kernel("sparse_attention", [](const Execution& execution) {
    if (harness::device_of(execution.backend).kind != DeviceKind::cpu) return;
    Attention a = with_large_dS();
    a.scale = static_cast<float>(3.4e38 * 0x1p-79);  // so that scale * dS is 3.4e38
    expect_close(a, forward_backward(a, execution), gradients_in_double(a));
  });
}

TEST(LargeNumbers, GradientsAreFiniteWhereTermsWouldBeInfiniteFromRoundedFactors) {
  on_each_kernel("sparse_attention", [](const Execution& execution) {
    if (harness::device_of(execution.backend).kind != DeviceKind::cpu) return;
    // bf16 rounds scale * dS up to 1.0078 * 2^100.
    Attention a = with_large_dS();
    a.scale = 1.0039215F * 0x1p21F;
    a.d_kv_type = DType::bf16;
    const double factor = 1.984375 * 0x1p27;
    Attention large_d_q = a;
    large_d_q.kv[9] = factor;
    Attention large_d_kv = a;
    large_d_kv.q[10] = factor;
    for (const Attention& large : {large_d_q, large_d_kv}) {
      AttentionGradients expected = gradients_in_double(large);
      expected.d_kv = as_stored(DType::bf16, expected.d_kv);
      expect_close(large, forward_backward(large, execution), expected);
    }
  });
}

TEST(LargeNumbers, OutIsFiniteWhereValuesAre) {
  // p of the last key is e^15.5 where those before are 1.
  on_each_kernel("sparse_attention", [](const Execution& execution) {
    if (harness::device_of(execution.backend).kind != DeviceKind::cpu) return;
    for (const DType dtype : {DType::bf16, DType::f32}) {
      Attention a = filled({.tokens = 2, .keys = 400, .topk = 300, .dtype = dtype, .scale = 1}, 12);
      const AttentionForwardWork work(a, harness::device_of(execution.backend));
      if (!is_taken(work.args, execution)) continue;
      SCOPED_TRACE(name(dtype));
      std::fill(a.q.begin(), a.q.end(), 0);
      for (std::int64_t row = 0; row < a.tokens * a.heads; ++row) a.q[(row + 1) * a.qk_dim - 1] = 1;
      for (std::size_t i = 0; i < a.indices.size(); ++i)
        a.indices[i] = static_cast<std::int32_t>(i) % 300;
      for (const double largest : {1e30, 1e32, 1e35, 0x1.fep127}) {
        for (std::int64_t i = 0; i < a.keys * a.qk_dim; ++i) {
          const bool is_value = i % a.qk_dim < a.v_dim;
          a.kv[i] = is_value ? (i % 3 == 0 ? largest : largest / 2) : 0;
        }
        a.kv[300 * a.qk_dim - 1] = 15.5;
        a.sink.clear();
        expect_close(a, forward(a, execution), plain_attention(a));
        a.sink = {14, 16, 18};
        const AttentionOutputs outputs = forward(a, execution);
        expect_close(a, outputs, plain_attention(a));
        expect_same_bits(forward(rows_of(a, 1, 1), execution), rows_of(a, outputs, 1, 1));
      }
    }
  });
}

TEST(SmallNumbers, ScoresBesideThemAreRightAndDependOnTheirRowsAlone) {
  on_each_kernel("index_topk", [](const Execution& execution) {
    Indexer ix = filled({.tokens = 10, .keys = 200, .heads = 32, .dim = 128, .topk = 64}, 5);
    scale_rows(ix.k, ix.dim, 3, 5, -70);
    scale_rows(ix.q, ix.heads * ix.dim, 2, 4, -70);
    ix.q = as_stored(ix.dtype, ix.q);
    ix.k = as_stored(ix.dtype, ix.k);
    const Selected selected = select(ix, execution);
    for (std::int64_t t = 0; t < ix.tokens; ++t) {
      const PlainScores scores = plain_scores(ix, t);
      for (std::int64_t j = 0; j < selected.lengths[t]; ++j) {
        EXPECT_NEAR(selected.scores[t * ix.topk + j],
                    scores.of_key[selected.indices[t * ix.topk + j]],
                    harness::score_limit(ix.dtype).value * scores.scale);
      }
    }
    ix.indices = selected.indices;
    ix.lengths = selected.lengths;
    // On CUDA another kernel may replay.
    if (execution.backend != Backend::cuda) {
      EXPECT_TRUE(same_bits(replay(ix, execution), selected.scores));
    }
    for (std::int64_t t = 0; t < ix.tokens; ++t)
      EXPECT_TRUE(same_bits(select(rows_of(ix, t, 1), execution).scores,
                            rows_of(ix, selected, t, 1).scores));
  });
}

/// Calls body(execution, indexer) for every kernel of the host, with an odd shape and one of the
/// models', whose rows have several blocks of slots.
template <class Body>
void on_each_host_indexer_in_bf16(std::uint64_t seed, const Body& body) {
  on_each_kernel("index_topk", [&](const Execution& execution) {
    if (harness::device_of(execution.backend).kind != DeviceKind::cpu) return;
    for (const Indexer& shape :
         {Indexer{}, Indexer{.tokens = 6, .keys = 300, .heads = 32, .dim = 128, .topk = 280}}) {
      Indexer ix = filled(shape, seed);
      for (std::int64_t i = 0; i < ix.tokens * ix.topk; ++i)
        ix.indices.push_back(static_cast<std::int32_t>(13 * (i % ix.topk) % ix.keys));
      SCOPED_TRACE(fmt::format("dim {}", ix.dim));
      body(execution, ix);
    }
  });
}

TEST(SmallNumbers, CountInTheGradientsOfTheIndexer) {
  on_each_host_indexer_in_bf16(13, [](const Execution& execution, const Indexer& whole) {
    struct Exponents {
      int q, k, weights, d_scores;
    };
    // Denormal inputs, then denormal products of two of them; the gradients are normal.
    for (const auto& [q, k, weights, d_scores] :
         {Exponents{40, -130, 30, 30}, Exponents{-130, 40, 30, 30}, Exponents{0, 0, -130, 80},
          Exponents{0, 30, 80, -130}, Exponents{-64, -62, 60, 60}, Exponents{-66, 20, -62, 80},
          Exponents{20, -66, 60, -62}}) {
      SCOPED_TRACE(
          fmt::format("q 2^{}, k 2^{}, weights 2^{}, d_scores 2^{}", q, k, weights, d_scores));
      Indexer ix = whole;
      scale_rows(ix.q, ix.dim, 0, 1, q);
      scale_rows(ix.k, ix.dim, 0, 1, k);
      scale_rows(ix.weights, ix.heads, 0, 1, weights);
      scale_rows(ix.d_scores, ix.topk, 0, 1, d_scores);
      expect_close(ix, backward(ix, execution), backward(ix, on(Backend::reference)));
    }
  });
}

TEST(SmallNumbers, LeaveTheGradientsOfTheIndexersOtherRows) {
  on_each_host_indexer_in_bf16(14, [](const Execution& execution, const Indexer& whole) {
    // Of rows 1 and 3 the last slots name the small keys; q of row 4 is small.
    Indexer ix = whole;
    const std::int64_t small = ix.keys - 20;
    scale_rows(ix.k, ix.dim, small, 1, -120);
    scale_rows(ix.q, ix.heads * ix.dim, 4, ix.tokens, -120);
    for (std::int64_t t = 0; t < ix.tokens; ++t) {
      ix.begin[t] = 0;
      ix.end[t] = static_cast<std::int32_t>(t == 1 || t == 3 ? ix.keys : small);
      for (std::int64_t j = 0; j < ix.topk; ++j)
        ix.indices[t * ix.topk + j] = static_cast<std::int32_t>(ix.keys - ix.topk + j);
    }
    const IndexGradients expected = backward(ix, on_threads(1, execution));
    expect_close(ix, expected, backward(ix, on(Backend::reference)));
    for (std::int64_t t = 0; t < ix.tokens; ++t) {
      const IndexGradients alone = backward(rows_of(ix, t, 1), execution);
      const std::int64_t row = ix.heads * ix.dim;
      EXPECT_TRUE(same_bits(alone.d_q, part(expected.d_q, t * row, row)));
      EXPECT_TRUE(same_bits(alone.d_weights, part(expected.d_weights, t * ix.heads, ix.heads)));
    }
    Execution little = on_threads(3, execution);
    little.workspace_limit = 1 << 19;
    for (const Execution& other : {on_threads(2, execution), little})
      expect_same_bits(backward(ix, other), expected);
  });
}

/// One head and two keys, of which the product with the second one is negative.
Indexer with_two_keys() {
  Indexer ix{.tokens = 1, .keys = 2, .heads = 1, .dim = 8, .topk = 2};
  ix.q.assign(8, 1);
  ix.k.assign(16, 1);
  std::fill(ix.k.begin() + 8, ix.k.end(), -1);
  ix.weights = {1};
  ix.begin = {0};
  ix.end = {2};
  ix.indices = {0, 1};
  ix.d_scores = {1, 1};
  return ix;
}

TEST(LargeNumbers, GradientsOfTheIndexerAreFiniteWhereThoseOfPairsWouldNotBe) {
  on_each_kernel("index_topk", [](const Execution& execution) {
    if (harness::device_of(execution.backend).kind != DeviceKind::cpu) return;
    Indexer large_weight = with_two_keys();  // bf16 would round it to infinity
    large_weight.weights = {3.4e38};
    large_weight.d_scores = {0x1p-30, 0x1p-30};
    Indexer large_d_score = with_two_keys();
    large_d_score.weights = {0x1p-20};
    large_d_score.d_scores = {3.4e38, 3.4e38};
    scale_rows(large_d_score.q, 8, 0, 1, -20);
    Indexer large_product = with_two_keys();  // of d_score and key
    large_product.weights = {0x1p-60};
    large_product.d_scores = {0x1p80, 0x1p80};
    scale_rows(large_product.k, 8, 0, 1, 60);
    scale_rows(large_product.q, 8, 0, 1, -60);
    Indexer infinite = with_two_keys();  // where the product is not positive
    infinite.d_scores[1] = kInfinity;
    Indexer large_sums = with_two_keys();  // of q and k, which overflow in another order
    large_sums.k = {1.25, 0, -1, 1.5, -1.875, 0, 0, 0, -1.25, 0, 1, -1.5, 1.875, 0, 0, 0};
    large_sums.weights = {0x1p-60};
    large_sums.d_scores = {0x1p-20, 0x1p-20};
    scale_rows(large_sums.q, 8, 0, 1, 64);
    scale_rows(large_sums.k, 8, 0, 1, 63);
    for (const Indexer& ix : {large_weight, large_d_score, large_product, infinite, large_sums})
      expect_close(ix, backward(ix, execution), backward(ix, on(Backend::reference)));
  });
}

}  // namespace
}  // namespace winnow::tests
