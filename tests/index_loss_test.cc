// SPDX-License-Identifier: Apache-2.0
// index_target and index_loss: values, gradients, which slots are valid, contents of the others.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "tests/attention_calls.h"

namespace winnow::tests {
namespace {

// ---- index_target.

double row_sum(const Values& values, std::int64_t t, std::int64_t width) {
  return std::accumulate(values.begin() + t * width, values.begin() + (t + 1) * width, 0.0);
}

TEST(IndexTarget, OfAllKeysSumsToTheHeads) {
  on_each_attention(1, [](Backend backend, const Attention& whole) {
    Attention a = whole;
    a.sink.clear();
    const Values target = target_of(a, forward(a, on(backend)).lse, on(backend));
    const double error = harness::target_limit(a.dtype).value * static_cast<double>(a.heads);
    for (std::int64_t t = 0; t < a.tokens; ++t)
      EXPECT_NEAR(row_sum(target, t, a.topk), static_cast<double>(a.heads), error);
    EXPECT_GE(*std::min_element(target.begin(), target.end()), 0);
  });
}

TEST(IndexTarget, LeavesTheSinksShareOut) {
  on_each_attention(2, [](Backend backend, const Attention& whole) {
    const Attention a = with_sink(whole, 2);
    const Values lse = forward(a, on(backend)).lse;
    const Values target = target_of(a, lse, on(backend));
    const double error = harness::target_limit(a.dtype).value * static_cast<double>(a.heads);
    for (std::int64_t t = 0; t < a.tokens; ++t) {
      double share = 0;
      for (std::int64_t h = 0; h < a.heads; ++h)
        share += 1 / (1 + std::exp(a.sink[h] - lse[t * a.heads + h]));
      EXPECT_NEAR(row_sum(target, t, a.topk), share, error);
    }
  });
}

TEST(IndexTarget, IsTheSumOfProbabilitiesOverHeads) {
  on_each_attention(3, [](Backend backend, const Attention& a) {
    const Values lse = as_stored(DType::f32, plain_attention(a).lse);
    Values expected;
    const Values q = as_stored(a.dtype, a.q);
    const Values kv = as_stored(a.dtype, a.kv);
    for (std::int64_t i = 0; i < a.tokens * a.topk; ++i) {
      double sum = 0;
      for (std::int64_t h = 0; h < a.heads; ++h) {
        double s = 0;
        const std::int64_t row = i / a.topk * a.heads + h;
        for (std::int64_t d = 0; d < a.qk_dim; ++d)
          s += q[row * a.qk_dim + d] * kv[a.indices[i] * a.qk_dim + d];
        const double sink = a.sink.empty() ? 0 : std::exp(a.sink[h] - lse[row]);
        sum += std::exp(a.scale_or_default() * s - lse[row]) / (1 + sink);
      }
      expected.push_back(sum);
    }
    for (const std::string_view kernel : harness::kernels_of("index_target", backend)) {
      SCOPED_TRACE(kernel);
      const Execution execution{.backend = backend, .kernel = kernel.data()};
      EXPECT_TRUE(ok(compare("target", target_of(a, lse, execution), expected,
                             harness::target_limit(a.dtype))));
    }
  });
}

// Pairs are added in another order: else nothing would show which of the two kernels ran.
TEST(IndexTarget, OfPairsOfBf16DiffersFromThatOfFloatsInLastBits) {
  const Execution pairs{.backend = Backend::cpu, .kernel = "avx512_bf16"};
  const Attention a = filled(Attention{.keys = 200, .qk_dim = 576, .v_dim = 512, .topk = 150}, 75);
  const Values lse = as_stored(DType::f32, plain_attention(a).lse);
  const AttentionForwardWork work(a, {});
  if (!is_taken(work.args, pairs)) GTEST_SKIP() << why_not(work.args, pairs);
  EXPECT_FALSE(same_bits(target_of(a, lse, pairs),
                         target_of(a, lse, {.backend = Backend::cpu, .kernel = "simd"})));
}

TEST(IndexTarget, IsZeroInSlotsWithoutAKey) {
  on_each_attention(4, [](Backend backend, const Attention& whole) {
    Attention a = whole;
    for (std::int64_t i = 0; i < a.tokens * a.topk; i += 3)
      a.indices[i] = i % 2 == 0 ? -1 : static_cast<std::int32_t>(a.keys);
    std::fill_n(a.indices.begin(), a.topk, kMaxInt32);  // a row without keys
    a.lengths.assign(static_cast<std::size_t>(a.tokens), static_cast<std::int32_t>(a.topk - 2));
    std::vector<bool> used(static_cast<std::size_t>(a.keys), false);
    std::vector<bool> valid;
    for (std::int64_t i = 0; i < a.tokens * a.topk; ++i) {
      const std::int32_t index = a.indices[i];
      valid.push_back(index >= 0 && index < a.keys && i % a.topk < a.topk - 2);
      if (valid.back()) used[index] = true;
    }
    const AttentionOutputs outputs = forward(a, on(backend));
    for (std::int64_t s = 0; s < a.keys; ++s)
      if (!used[s]) std::fill_n(a.kv.begin() + s * a.qk_dim, a.qk_dim, kNaN);
    const Values target = target_of(a, outputs.lse, on(backend));
    for (std::size_t i = 0; i < target.size(); ++i) {
      if (valid[i]) {
        EXPECT_GT(target[i], 0);
      } else {
        EXPECT_EQ(target[i], 0);
      }
    }
  });
}

TEST(IndexTarget, CountsIndicesFromTheKeyOffset) {
  on_each_attention(5, [](Backend backend, const Attention& a) {
    const Values lse = forward(a, on(backend)).lse;
    const Values expected = target_of(a, lse, on(backend));
    // The same keys after others that contain NaN.
    const std::int32_t offset = 7;
    Attention behind = a;
    behind.keys += offset;
    behind.kv.insert(behind.kv.begin(), static_cast<std::size_t>(offset * a.qk_dim), kNaN);
    EXPECT_TRUE(same_bits(target_of(behind, lse, on(backend), offset), expected));
    // An index past the last key is invalid.
    const Values cut = target_of(a, lse, on(backend), static_cast<std::int32_t>(a.keys - 1));
    for (std::size_t i = 0; i < cut.size(); ++i)
      EXPECT_EQ(cut[i] != 0, a.indices[i] == 0) << a.indices[i];
    EXPECT_TRUE(all_zero(target_of(a, lse, on(backend), static_cast<std::int32_t>(a.keys))));
  });
}

TEST(IndexTarget, OfAnInfiniteSinkIsNothingAndOfMinusInfinityAll) {
  on_each_attention(6, [](Backend backend, const Attention& whole) {
    Attention a = whole;
    a.sink.clear();
    const Values lse = forward(a, on(backend)).lse;
    const Values without = target_of(a, lse, on(backend));
    a.sink.assign(static_cast<std::size_t>(a.heads), -kInfinity);
    EXPECT_TRUE(ok(compare("target", target_of(a, lse, on(backend)), without,
                           harness::target_limit(DType::f32))));
    a.sink.assign(static_cast<std::size_t>(a.heads), kInfinity);
    EXPECT_TRUE(all_zero(target_of(a, lse, on(backend))));
  });
}

TEST(IndexTarget, OfASinkThatIsNaNIsNaN) {
  on_each_attention(7, [](Backend backend, const Attention& whole) {
    Attention a = whole;
    const Values lse = forward(a, on(backend)).lse;
    a.sink.assign(static_cast<std::size_t>(a.heads), 0.0);
    a.sink.back() = kNaN;
    EXPECT_TRUE(all_equal(target_of(a, lse, on(backend)), kNaN));
  });
}

// By rounding to fp32 lse may lose more than exp bears.
TEST(IndexTarget, IsAtMostTheHeadsWhereLogitsAreLarge) {
  on_each_attention(8, [](Backend backend, const Attention& whole) {
    for (const double factor : {1e10, 1e30}) {
      SCOPED_TRACE(factor);
      Attention a = whole;
      for (double& value : a.q) value *= factor;
      for (const double value : target_of(a, forward(a, on(backend)).lse, on(backend))) {
        EXPECT_GE(value, 0);
        EXPECT_LE(value, static_cast<double>(a.heads));
      }
    }
  });
}

/// The heads [first, first + count) of a tensor of `width` elements a head.
Values heads_of(const Values& values, std::int64_t heads, std::int64_t width, std::int64_t first,
                std::int64_t count) {
  Values result;
  const std::int64_t row = heads * width;
  for (std::int64_t t = 0; t * row < static_cast<std::int64_t>(values.size()); ++t) {
    const Values of_row = part(values, t * row + first * width, count * width);
    result.insert(result.end(), of_row.begin(), of_row.end());
  }
  return result;
}

Attention heads_of(Attention a, std::int64_t first, std::int64_t count) {
  a.q = heads_of(a.q, a.heads, a.qk_dim, first, count);
  if (!a.sink.empty()) a.sink = part(a.sink, first, count);
  a.heads = count;
  return a;
}

TEST(IndexTarget, OfPartsOfTheHeadsAddsUpToTheWhole) {
  on_each_attention(9, [](Backend backend, const Attention& a) {
    const Values lse = forward(a, on(backend)).lse;
    const std::int64_t half = a.heads / 2;
    const Values first_half =
        target_of(heads_of(a, 0, half), heads_of(lse, a.heads, 1, 0, half), on(backend));
    const Values whole =
        target_of(heads_of(a, half, a.heads - half),
                  heads_of(lse, a.heads, 1, half, a.heads - half), on(backend), 0, first_half);
    EXPECT_TRUE(ok(compare("target", whole, target_of(a, lse, on(backend)),
                           harness::target_limit(DType::f32))));
  });
}

TEST(IndexTarget, AddedToLeavesSlotsWithoutAKeyAsTheyAre) {
  on_each_attention(10, [](Backend backend, const Attention& whole) {
    Attention a = whole;
    for (std::int64_t i = 0; i < a.tokens * a.topk; i += 3) a.indices[i] = -1;
    a.lengths.assign(static_cast<std::size_t>(a.tokens), static_cast<std::int32_t>(a.topk - 2));
    const Values lse = forward(a, on(backend)).lse;
    const Values alone = target_of(a, lse, on(backend));
    Values before = as_stored(DType::f32, normals(a.tokens * a.topk, 10, "before"));
    Values expected = before;
    for (std::int64_t i = 0; i < a.tokens * a.topk; ++i) {
      const bool has_key = a.indices[i] >= 0 && i % a.topk < a.topk - 2;
      if (!has_key) before[i] = expected[i] = i % 2 == 0 ? kNaN : -7;
      if (has_key) expected[i] += alone[i];
    }
    EXPECT_TRUE(ok(compare("target", target_of(a, lse, on(backend), 0, before), expected,
                           harness::target_limit(DType::f32))));
  });
}

TEST(IndexTarget, RowsThreadsAndRepeatsDoNotMatter) {
  on_each_attention(7, [](Backend backend, const Attention& a) {
    const AttentionOutputs outputs = forward(a, on(backend));
    const Values target = target_of(a, outputs.lse, on(backend));
    for (const int threads : {1, 2, 5})
      EXPECT_TRUE(
          same_bits(target_of(a, outputs.lse, {.backend = backend, .threads = threads}), target));
    for (std::int64_t t = 0; t < a.tokens; ++t)
      EXPECT_TRUE(same_bits(target_of(rows_of(a, t, 1), rows_of(a, outputs, t, 1).lse, on(backend)),
                            part(target, t * a.topk, a.topk)));
  });
}

// ---- index_loss.

struct Loss {
  std::int64_t topk = 0;
  Ints indices{};
  Ints lengths{};  // empty: absent
  Values scores{}, target{};
};

struct LossResult {
  Values loss, d_scores;
};

LossResult loss_of(const Loss& l, const Execution& execution) {
  const Device device = harness::device_of(execution.backend);
  const auto tokens = static_cast<std::int64_t>(l.indices.size()) / l.topk;
  const Buffer indices = ints(device, {tokens, l.topk}, l.indices);
  const Buffer lengths = ints(device, {tokens}, l.lengths);
  const Buffer scores = floats(device, DType::f32, {tokens, l.topk}, l.scores);
  const Buffer target = floats(device, DType::f32, {tokens, l.topk}, l.target);
  const Buffer loss(device, DType::f32, {tokens});
  const Buffer d_scores(device, DType::f32, {tokens, l.topk});
  index_loss({.indices = indices.tensor(),
              .lengths = lengths.tensor(),
              .scores = scores.tensor(),
              .target = target.tensor(),
              .loss = loss.tensor(),
              .d_scores = d_scores.tensor()},
             execution);
  expect_canaries_intact(indices, lengths, scores, target, loss, d_scores);
  return {loss.download(), d_scores.download()};
}

Loss random_loss(std::int64_t tokens, std::int64_t topk, std::uint64_t seed) {
  Loss l{.topk = topk};
  l.scores = as_stored(DType::f32, normals(tokens * topk, seed, "scores", 2));
  for (std::int64_t i = 0; i < tokens * topk; ++i) {
    l.indices.push_back(static_cast<std::int32_t>(i % topk));
    l.target.push_back(Random(seed, "target").uniform(i));
  }
  l.target = as_stored(DType::f32, l.target);
  return l;
}

/// Loss and gradient over all slots by the formulas.
LossResult plain_loss(const Loss& l) {
  LossResult result;
  for (std::size_t first = 0; first < l.scores.size(); first += l.topk) {
    double sum = 0, normaliser = 0, loss = 0;
    for (std::int64_t j = 0; j < l.topk; ++j) {
      sum += l.target[first + j];
      normaliser += std::exp(l.scores[first + j]);
    }
    for (std::int64_t j = 0; j < l.topk; ++j) {
      const double wanted = l.target[first + j] / sum;
      const double given = std::exp(l.scores[first + j]) / normaliser;
      if (wanted > 0) loss += wanted * std::log(wanted / given);
      result.d_scores.push_back(given - wanted);
    }
    result.loss.push_back(loss);
  }
  return result;
}

void expect_close(const LossResult& actual, const LossResult& expected) {
  EXPECT_TRUE(ok(compare("loss", actual.loss, expected.loss, harness::loss_limit(DType::f32),
                         harness::at_least_one(expected.loss))));
  EXPECT_TRUE(
      ok(compare("d_scores", actual.d_scores, expected.d_scores, harness::loss_gradient_limit())));
}

TEST(IndexLoss, IsTheDivergenceAndItsGradient) {
  on_each_backend([](Backend backend) {
    for (const std::int64_t topk : {2, 3, 64, 1000}) {
      const Loss l = random_loss(7, topk, 11);
      const LossResult result = loss_of(l, on(backend));
      expect_close(result, plain_loss(l));
      for (std::int64_t t = 0; t < 7; ++t) {
        EXPECT_GE(result.loss[t], 0);
        EXPECT_NEAR(row_sum(result.d_scores, t, topk), 0, 1e-5);
      }
    }
  });
}

TEST(IndexLoss, OfEqualDistributionsIsZero) {
  on_each_backend([](Backend backend) {
    Loss l = random_loss(5, 33, 12);
    for (std::size_t i = 0; i < l.scores.size(); ++i) {
      l.target[i] = 0.01 + l.target[i];
      l.scores[i] = std::log(3 * l.target[i]);  // the target may be scaled by any factor
    }
    const LossResult result = loss_of(l, on(backend));
    for (const double loss : result.loss) EXPECT_NEAR(loss, 0, 1e-6);
    for (const double gradient : result.d_scores) EXPECT_NEAR(gradient, 0, 1e-6);
  });
}

/// One call whose heads are those of two layers with keys of their own: each layer has its own
/// channels, and the channels of the other are 0 in its queries.
Attention concatenated(const Attention& a, const Attention& b) {
  Attention both = a;
  both.heads = a.heads + b.heads;
  both.qk_dim = a.qk_dim + b.qk_dim;
  both.q.clear();
  both.kv.clear();
  const auto append = [](Values& values, const Values& more) {
    values.insert(values.end(), more.begin(), more.end());
  };
  for (std::int64_t t = 0; t < a.tokens; ++t) {
    for (std::int64_t h = 0; h < a.heads; ++h) {
      append(both.q, part(a.q, (t * a.heads + h) * a.qk_dim, a.qk_dim));
      append(both.q, Values(static_cast<std::size_t>(b.qk_dim)));
    }
    for (std::int64_t h = 0; h < b.heads; ++h) {
      append(both.q, Values(static_cast<std::size_t>(a.qk_dim)));
      append(both.q, part(b.q, (t * b.heads + h) * b.qk_dim, b.qk_dim));
    }
  }
  for (std::int64_t s = 0; s < a.keys; ++s) {
    append(both.kv, part(a.kv, s * a.qk_dim, a.qk_dim));
    append(both.kv, part(b.kv, s * b.qk_dim, b.qk_dim));
  }
  return both;
}

TEST(IndexLoss, OfLayersThatShareASelectionIsThatOfOneWithTheirHeads) {
  on_each_backend([](Backend backend) {
    for (const Attention& shape :
         {Attention{}, Attention{.dtype = DType::f32},
          Attention{.tokens = 3, .keys = 90, .heads = 40, .qk_dim = 288, .topk = 70}}) {
      const Attention a = filled(shape, 16);
      Attention b = filled(shape, 17);
      b.indices = a.indices;
      const Values first = target_of(a, forward(a, on(backend)).lse, on(backend));
      const Values sum = target_of(b, forward(b, on(backend)).lse, on(backend), 0, first);
      const Attention both = concatenated(a, b);
      const Values target = target_of(both, forward(both, on(backend)).lse, on(backend));
      EXPECT_TRUE(ok(compare("target", sum, target, harness::target_limit(a.dtype))));

      Loss l = random_loss(a.tokens, a.topk, 16);
      l.indices = a.indices;
      l.target = target;
      const LossResult expected = loss_of(l, on(backend));
      l.target = sum;
      expect_close(loss_of(l, on(backend)), expected);
    }
  });
}

TEST(IndexLoss, DoesNotChangeWithTheScaleOfTheTargetOrAShiftOfTheScores) {
  on_each_backend([](Backend backend) {
    const Loss l = random_loss(5, 33, 13);
    Loss other = l;
    for (double& target : other.target) target *= 128;
    for (double& score : other.scores) score += 50;
    other.scores = as_stored(DType::f32, other.scores);
    expect_close(loss_of(other, on(backend)), plain_loss(other));
    Loss scaled = l;
    for (double& target : scaled.target) target *= 128;
    expect_close(loss_of(scaled, on(backend)), plain_loss(l));
  });
}

TEST(IndexLoss, TakesScoresFarApartAndTargetsOfZero) {
  on_each_backend([](Backend backend) {
    Loss l{.topk = 4};
    l.indices = {0, 1, 2, 3, 0, 1, 2, 3};
    l.scores = {3e4, -3e4, 0, 1, 0, 0, 0, 0};
    l.target = {1, 1, 0, 0, 0, 0, 5, 0};
    const LossResult result = loss_of(l, on(backend));
    // log(1/2) - (-6e4) / 2, and a one-hot target against four equal scores.
    EXPECT_NEAR(result.loss[0], 3e4 - std::log(2), 1e-5 * 3e4);
    EXPECT_NEAR(result.loss[1], std::log(4), 1e-5);
    const Values expected = {0.5, -0.5, 0, 0, 0.25, 0.25, -0.75, 0.25};
    EXPECT_TRUE(ok(compare("d_scores", result.d_scores, expected, harness::loss_gradient_limit())));
  });
}

TEST(IndexLoss, LargeScoresThatTieShareTheirRow) {
  on_each_backend([](Backend backend) {
    for (const double score : {1e10, 1e20, 3e38, -3e38}) {
      SCOPED_TRACE(score);
      Loss l = random_loss(2, 64, 17);
      l.scores.assign(l.scores.size(), 0.0);
      const LossResult expected = plain_loss(l);
      l.scores.assign(l.scores.size(), score);
      l.scores = as_stored(DType::f32, l.scores);
      expect_close(loss_of(l, on(backend)), expected);
    }
  });
}

TEST(IndexLoss, OfFewerThanTwoSlotsIsZero) {
  on_each_backend([](Backend backend) {
    Loss l{.topk = 3};
    l.indices = {5, -1, -1, -1, -1, -1, 5, 6, 7, 5, 6, 7};
    l.scores = {1, 2, 3, 1, 2, 3, 1, -kInfinity, -kInfinity, 1, 2, 3};
    l.target = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
    l.lengths = {3, 3, 3, 1};
    const LossResult result = loss_of(l, on(backend));
    EXPECT_TRUE(all_zero(result.loss));
    EXPECT_TRUE(all_zero(result.d_scores));
  });
}

TEST(IndexLoss, OfATargetOfZeroIsZero) {
  on_each_backend([](Backend backend) {
    Loss l = random_loss(3, 8, 14);
    std::fill_n(l.target.begin() + 8, 8, 0);
    const LossResult result = loss_of(l, on(backend));
    EXPECT_EQ(result.loss[1], 0);
    EXPECT_TRUE(all_zero(part(result.d_scores, 8, 8)));
    EXPECT_GT(result.loss[0], 0);
  });
}

TEST(IndexLoss, SlotsThatDoNotCountMayHoldAnything) {
  on_each_backend([](Backend backend) {
    const Loss dense = random_loss(4, 10, 15);
    const LossResult expected = loss_of(dense, on(backend));
    // The same slots in a wider list, mixed with slots without a key, slots with score -inf and
    // slots past the length.
    Loss wide{.topk = 36};
    for (std::int64_t t = 0; t < 4; ++t) {
      for (std::int64_t j = 0; j < 10; ++j) {
        const std::int64_t i = t * 10 + j;
        wide.indices.insert(wide.indices.end(), {-1, dense.indices[i], 4});
        wide.scores.insert(wide.scores.end(), {kNaN, dense.scores[i], -kInfinity});
        wide.target.insert(wide.target.end(), {kNaN, dense.target[i], j % 2 == 0 ? kNaN : 7});
      }
      wide.indices.insert(wide.indices.end(), {1, 2, 3, 4, 5, 6});
      wide.scores.insert(wide.scores.end(), {kNaN, kInfinity, 1, 2, 3, kNaN});
      wide.target.insert(wide.target.end(), {1, 2, kNaN, kInfinity, 5, 6});
      wide.lengths.push_back(30);
    }
    const LossResult result = loss_of(wide, on(backend));
    LossResult counted{result.loss, {}};
    for (std::int64_t i = 0; i < 4 * 36; ++i) {
      if (i % 36 < 30 && i % 3 == 1) {
        counted.d_scores.push_back(result.d_scores[i]);
      } else {
        EXPECT_EQ(result.d_scores[i], 0) << i;
      }
    }
    expect_close(counted, expected);
  });
}

TEST(IndexLoss, RowsThreadsAndRepeatsDoNotMatter) {
  on_each_backend([](Backend backend) {
    const Loss l = random_loss(9, 50, 16);
    const LossResult result = loss_of(l, on(backend));
    for (const int threads : {0, 1, 2, 5}) {
      const LossResult again = loss_of(l, {.backend = backend, .threads = threads});
      EXPECT_TRUE(same_bits(again.loss, result.loss));
      EXPECT_TRUE(same_bits(again.d_scores, result.d_scores));
    }
    for (std::int64_t t = 0; t < 9; ++t) {
      const LossResult alone = loss_of({.topk = 50,
                                        .indices = part(l.indices, t * 50, 50),
                                        .scores = part(l.scores, t * 50, 50),
                                        .target = part(l.target, t * 50, 50)},
                                       on(backend));
      EXPECT_EQ(alone.loss[0], result.loss[t]);
      EXPECT_TRUE(same_bits(alone.d_scores, part(result.d_scores, t * 50, 50)));
    }
  });
}

}  // namespace
}  // namespace winnow::tests
