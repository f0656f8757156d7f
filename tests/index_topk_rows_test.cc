// SPDX-License-Identifier: Apache-2.0
// index_topk: the selection of a row depends on that row alone; rounding; replay; fp8; gradients.
#include "tests/far_memory.h"
#include "tests/indexer_calls.h"
#include "tests/simd_targets.h"

namespace winnow::tests {
namespace {

/// The call with the indices that the backend selects.
Indexer with_selection(Indexer ix, const Execution& execution) {
  const Selected selected = select(ix, execution);
  ix.indices = selected.indices;
  ix.lengths = selected.lengths;
  return ix;
}

// ---- What a row depends on.

TEST(IndexTopkRows, DoNotDependOnTheirNeighbours) {
  on_each_indexer([](const Execution& execution, const Indexer& shape) {
    const Indexer ix = filled(shape, 21);
    const Selected together = select(ix, execution);
    for (std::int64_t t = 0; t < ix.tokens; ++t)
      expect_same_bits(select(rows_of(ix, t, 1), execution), rows_of(ix, together, t, 1));
    expect_same_bits(select(rows_of(ix, 1, 3), execution), rows_of(ix, together, 1, 3));
  });
}

TEST(IndexTopkRows, DoNotDependOnKeysOutsideTheirWindow) {
  on_each_indexer([](const Execution& execution, const Indexer& shape) {
    const Indexer ix = filled(shape, 22);
    const Selected expected = select(ix, execution);
    // More keys before and after, all of them NaN.
    const std::int64_t more = 37;
    Indexer wide = ix;
    wide.keys = ix.keys + 2 * more;
    const Values nan(static_cast<std::size_t>(more * ix.dim), kNaN);
    wide.k.insert(wide.k.begin(), nan.begin(), nan.end());
    wide.k.insert(wide.k.end(), nan.begin(), nan.end());
    for (std::int64_t t = 0; t < ix.tokens; ++t) {
      wide.begin[t] += more;
      wide.end[t] += more;
    }
    Selected shifted = select(wide, execution);
    for (std::int32_t& index : shifted.indices)
      if (index >= 0) index -= static_cast<std::int32_t>(more);
    expect_same_bits(shifted, expected);
  });
}

TEST(IndexTopkRows, DoNotDependOnThreadsOrTheWorkspaceLimit) {
  on_each_indexer([](const Execution& execution, const Indexer& shape) {
    const Indexer ix = filled(shape, 23);
    const Selected expected = select(ix, execution);
    for (const int threads : {1, 2, 5, 1024})
      expect_same_bits(select(ix, on_threads(threads, execution)), expected);
    int runs = 0;
    for (const std::size_t limit :
         {std::size_t{1} << 12, std::size_t{1} << 16, std::size_t{1} << 22,
          std::numeric_limits<std::size_t>::max()}) {
      Execution limited = execution;
      limited.workspace_limit = limit;
      const IndexForwardWork work(ix, harness::device_of(execution.backend), false);
      const std::string reason = why_not(work.args, limited);
      if (!reason.empty()) {
        EXPECT_NE(reason.find("workspace_limit"), std::string::npos) << reason;
        continue;
      }
      ++runs;
      EXPECT_LE(workspace_bytes(work.args, limited), limit);
      expect_same_bits(select(ix, limited), expected);
    }
    EXPECT_GE(runs, 2);
  });
}

TEST(IndexTopkRows, GiveTheSameBitsAgain) {
  on_each_indexer([](const Execution& execution, const Indexer& shape) {
    const Indexer ix = filled(shape, 24);
    const Selected first = select(ix, execution);
    for (int i = 0; i < 10; ++i) expect_same_bits(select(ix, execution), first);
  });
}

TEST(IndexTopkRows, OfStridedTensorsAreSelectedAlike) {
  on_each_indexer([](const Execution& execution, const Indexer& shape) {
    Indexer ix = filled_exactly(shape, 25);
    const Selected expected = plain_selection(ix);
    for (const std::int64_t padding : {3, 8}) {
      ix.row_padding = padding;
      expect_selected(select(ix, execution), expected);
    }
  });
}

/// 70,000 rows with windows of four keys each, with integer values.
Indexer many_rows(std::uint64_t seed) {
  const std::int64_t tokens = 70000;
  Indexer ix{.tokens = tokens, .keys = tokens, .heads = 1, .dim = 8, .topk = 2};
  ix.q = whole_numbers(tokens * 8, seed, "q", -2, 2);
  ix.k = whole_numbers(tokens * 8, seed, "k", -2, 2);
  ix.weights.assign(tokens, 1);
  ix.d_scores = whole_numbers(tokens * ix.topk, seed, "d_scores", -2, 2);
  for (std::int32_t t = 0; t < tokens; ++t) {
    ix.begin.push_back(std::max(t - 3, 0));
    ix.end.push_back(t + 1);
  }
  return ix;
}

TEST(IndexTopkRows, MayBeMoreThan65535) {
  on_each_kernel("index_topk", [](const Execution& execution) {
    const Indexer ix = many_rows(26);
    const Selected selected = select(ix, execution);
    for (const std::int64_t t : {0, 65535, 65536, 69999})
      expect_selected(rows_of(ix, selected, t, 1), plain_selection(rows_of(ix, t, 1)));
  });
}

TEST(IndexTopkRows, MayLiePast31Bits) {
  on_each_kernel("index_topk", [](const Execution& execution) {
    const Indexer ix = filled({.tokens = 3, .keys = 9, .topk = 4}, 27);
    const IndexForwardWork work(ix, harness::device_of(execution.backend), false);
    {
      const FarTensor q(work.args.q), k(work.args.k), weights(work.args.weights),
          indices(work.args.indices), scores(work.args.scores);
      if (!q || !k || !weights || !indices || !scores)
        GTEST_SKIP() << "no room for a large range of addresses";
      IndexTopkForward far = work.args;
      far.q = q.tensor();
      far.k = k.tensor();
      far.weights = weights.tensor();
      far.indices = indices.tensor();
      far.scores = scores.tensor();
      run_where_taken(far, execution);
      indices.download_all();
      scores.download_all();
    }
    expect_same_bits(work.selected(), select(ix, execution));
  });
}

// ---- Rounding.

/// One row and key. The first product is 1, the others of the first head are 2^-24, and each other
/// head has one of those: added to a sum of 1 one after another, all of them are lost in fp32.
Indexer with_terms_that_sums_lose(std::int64_t heads, std::int64_t dim) {
  Indexer ix = filled({.tokens = 1, .keys = 1, .heads = heads, .dim = dim, .topk = 1}, 51);
  std::fill(ix.weights.begin(), ix.weights.end(), 1);
  std::fill(ix.k.begin(), ix.k.end(), 0x1p-12);
  ix.k[0] = 1;
  std::fill(ix.q.begin(), ix.q.end(), 0);
  std::fill_n(ix.q.begin(), dim, 0x1p-12);
  for (std::int64_t h = 0; h < heads; ++h) ix.q[h * dim] = h == 0 ? 1 : 0x1p-24;
  ix.begin = {0};
  ix.end = {1};
  return ix;
}

void expect_scores_close(const Indexer& ix, const Execution& execution) {
  const PlainScores scores = plain_scores(ix, 0);
  EXPECT_NEAR(select(ix, execution).scores[0], scores.of_key[0],
              harness::score_limit(ix.dtype).value * scores.scale);
}

TEST(IndexTopkRounding, DoesNotGrowWithTheNumberOfTerms) {
  on_each_kernel("index_topk", [](const Execution& execution) {
    if (execution.backend == Backend::cuda) return;  // tensor cores have sums of their own
    for (const std::int64_t target : simd_targets()) {
      const OnSimdTarget on_target(target);
      for (const std::int64_t heads : {1, 64, 300}) {
        for (const std::int64_t dim : {128, 136, 256, 264, 512, 1024}) {
          const Indexer ix = with_terms_that_sums_lose(heads, dim);
          const IndexForwardWork work(ix, {}, false);
          if (!why_not(work.args, execution).empty()) continue;  // on this target
          SCOPED_TRACE(fmt::format("{} heads, dim {}, {}", heads, dim, hwy::TargetName(target)));
          expect_scores_close(ix, execution);
        }
      }
    }
  });
}

// ---- Replay.

TEST(IndexTopkReplay, GivesTheScoresOfTheSelection) {
  on_each_indexer([](const Execution& execution, const Indexer& shape) {
    Indexer exact = filled_exactly(shape, 31);
    exact.order = SlotOrder::by_score;
    const Selected selected = select(exact, execution);
    exact.indices = selected.indices;
    EXPECT_TRUE(ok(harness::compare_exactly("scores", replay(exact, execution), selected.scores)));

    Indexer ix = filled(shape, 31);
    const Selected chosen = select(ix, execution);
    ix.indices = chosen.indices;
    const Values scores = replay(ix, execution);
    // One kernel of cuda does both; of others the sums over heads may differ in their order.
    const bool is_same_kernel =
        execution.kernel != nullptr && std::string_view(execution.kernel) == "general";
    for (std::int64_t t = 0; t < ix.tokens; ++t) {
      const double error = harness::score_limit(ix.dtype).value * plain_scores(ix, t).scale;
      for (std::int64_t j = 0; j < ix.topk; ++j) {
        if (j < chosen.lengths[t]) {
          EXPECT_NEAR(scores[t * ix.topk + j], chosen.scores[t * ix.topk + j],
                      is_same_kernel ? 0 : error);
        } else {
          EXPECT_EQ(scores[t * ix.topk + j], -kInfinity);
        }
      }
    }
  });
}

TEST(IndexTopkReplay, OutsideTheWindowIsMinusInfinity) {
  on_each_kernel("index_topk", [](const Execution& execution) {
    Indexer ix = filled_exactly({.tokens = 2, .keys = 20, .topk = 8}, 32);
    ix.begin = {5, 0};
    ix.end = {10, 0};
    ix.indices = {4, 5, 9, 10, 19, -1, 20, kMaxInt32, 0, 1, 2, 3, kMinInt32, -1, 5, 7};
    const Values all = plain_scores(ix, 0).of_key;
    EXPECT_EQ(replay(ix, execution),
              (Values{-kInfinity, all[5], all[9], -kInfinity, -kInfinity, -kInfinity, -kInfinity,
                      -kInfinity, -kInfinity, -kInfinity, -kInfinity, -kInfinity, -kInfinity,
                      -kInfinity, -kInfinity, -kInfinity}));
    // Also slots past lengths; a repeated key is scored twice.
    ix.indices = {6, 6, 7, 8, 9, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7};
    ix.lengths = {3, 8};
    EXPECT_EQ(part(replay(ix, execution), 0, 8),
              (Values{all[6], all[6], all[7], -kInfinity, -kInfinity, -kInfinity, -kInfinity,
                      -kInfinity}));
  });
}

TEST(IndexTopkReplay, KeepsNan) {
  on_each_kernel("index_topk", [](const Execution& execution) {
    Indexer ix = filled_exactly({.tokens = 1, .keys = 10, .topk = 3}, 33);
    ix.k[4 * ix.dim] = kNaN;
    ix.begin = {0};
    ix.end = {8};
    ix.indices = {3, 4, 9};
    const Values scores = replay(ix, execution);
    EXPECT_EQ(scores[0], plain_scores(ix, 0).of_key[3]);
    EXPECT_TRUE(std::isnan(scores[1]));
    EXPECT_EQ(scores[2], -kInfinity);
  });
}

// ---- fp8.

TEST(IndexTopkFp8, SelectsByTheDequantisedKeys) {
  on_each_kernel("index_topk", [](const Execution& execution) {
    for (const std::int64_t heads : {3, 64}) {
      Indexer ix = filled_exactly({.tokens = 5,
                                   .keys = 200,
                                   .heads = heads,
                                   .dim = 128,
                                   .topk = 40,
                                   .dtype = DType::f8_e4m3},
                                  34);
      // Powers of two keep every sum exact.
      const Random random(34, "k_scale");
      for (std::int64_t s = 0; s < ix.keys; ++s)
        ix.k_scale.push_back(std::ldexp(1.0, static_cast<int>(random.below(s, 5)) - 2));
      const Selected selected = select(ix, execution);
      expect_selected(selected, plain_selection(ix));
      ix.indices = selected.indices;
      EXPECT_TRUE(ok(harness::compare_exactly("scores", replay(ix, execution), selected.scores)));
    }
  });
}

/// Scales between 1/37 and 100/37.
Indexer filled_fp8(std::int64_t heads, std::int64_t topk, std::uint64_t seed,
                   std::int64_t tokens = 5, std::int64_t keys = 200) {
  Indexer ix = filled({.tokens = tokens,
                       .keys = keys,
                       .heads = heads,
                       .dim = 128,
                       .topk = topk,
                       .dtype = DType::f8_e4m3},
                      seed);
  ix.k_scale = whole_numbers(ix.keys, seed, "k_scale", 1, 100);
  for (double& scale : ix.k_scale) scale /= 37;
  return ix;
}

TEST(IndexTopkFp8, ScoresAreCloseToThoseOfTheDequantisedValues) {
  on_each_kernel("index_topk", [](const Execution& execution) {
    const Indexer ix = filled_fp8(8, 40, 35);
    const Selected selected = select(ix, execution);
    for (std::int64_t t = 0; t < ix.tokens; ++t) {
      const PlainScores scores = plain_scores(ix, t);
      for (std::int64_t j = 0; j < selected.lengths[t]; ++j)
        EXPECT_NEAR(selected.scores[t * ix.topk + j],
                    scores.of_key[selected.indices[t * ix.topk + j]],
                    harness::score_limit(ix.dtype).value * scores.scale);
    }
  });
}

TEST(IndexTopkFp8, KeepsNanKeysOut) {
  on_each_kernel("index_topk", [](const Execution& execution) {
    Indexer ix = filled_exactly({.tokens = 2, .keys = 50, .topk = 50, .dtype = DType::f8_e4m3}, 36);
    ix.k_scale.assign(50, 1);
    ix.k[7 * ix.dim + 3] = kNaN;
    ix.k_scale[11] = kNaN;
    expect_selected(select(ix, execution), plain_selection(ix));
  });
}

/// Small integers, whose sums are exact, with scales of every kind.
Indexer with_odd_scales(std::uint64_t seed) {
  Indexer ix = filled_exactly(
      {.tokens = 5, .keys = 200, .heads = 32, .dim = 128, .topk = 150, .dtype = DType::f8_e4m3},
      seed);
  const double scales[] = {1, -1, 0, 0x1p-100, 0x1p100, -0x1p50, 0x1p-50, 0.5, 2};
  for (std::int64_t s = 0; s < ix.keys; ++s) ix.k_scale.push_back(scales[s % 9]);
  return ix;
}

TEST(IndexTopkFp8, ScalesMayBeNegativeZeroTinyAndHuge) {
  on_each_kernel("index_topk", [](const Execution& execution) {
    const Indexer ix = with_odd_scales(39);
    expect_selected(select(ix, execution), plain_selection(ix));
  });
}

// Sums over heads that fp32 holds only once they are scaled. CUDA's kernels scale them afterwards.
TEST(IndexTopkFp8, OnTheHostScalesMayMakeUpForTheWeights) {
  on_each_kernel("index_topk", [](const Execution& execution) {
    if (harness::device_of(execution.backend).kind != DeviceKind::cpu) return;
    for (const int exponent : {122, 100, -100, -135}) {
      SCOPED_TRACE(fmt::format("weights times 2^{}", exponent));
      Indexer ix = filled_fp8(32, 40, 40);
      for (double& weight : ix.weights) weight = std::ldexp(weight, exponent);
      for (double& scale : ix.k_scale) scale = std::ldexp(scale, exponent > 0 ? -100 : 100);
      const Selected selected = select(ix, execution);
      for (std::int64_t t = 0; t < ix.tokens; ++t) {
        const PlainScores scores = plain_scores(ix, t);
        const double limit = harness::score_limit(DType::bf16).value * scores.scale;
        EXPECT_EQ(selected.lengths[t], std::min<std::int64_t>(ix.topk, ix.end[t] - ix.begin[t]));
        double least = kInfinity;
        for (std::int64_t j = 0; j < selected.lengths[t]; ++j) {
          const double expected = scores.of_key[selected.indices[t * ix.topk + j]];
          EXPECT_NEAR(selected.scores[t * ix.topk + j], expected, limit);
          least = std::min(least, expected);
        }
        const auto first = scores.of_key.begin();
        const auto above = std::count_if(first + ix.begin[t], first + ix.end[t],
                                         [&](double s) { return s > least + 2 * limit; });
        EXPECT_LE(above, selected.lengths[t]) << "a key with a larger score was left out";
      }
    }
  });
}

TEST(IndexTopkFp8, OnTheHostScalesOf0GiveScoresOf0WhateverTheWeightsAre) {
  on_each_kernel("index_topk", [](const Execution& execution) {
    if (harness::device_of(execution.backend).kind != DeviceKind::cpu) return;
    Indexer ix = with_odd_scales(41);
    for (double& weight : ix.weights) weight = std::ldexp(weight, 120);
    for (double& scale : ix.k_scale) scale = 0;
    expect_selected(select(ix, execution), plain_selection(ix));
  });
}

TEST(IndexTopkFp8, ScoresDoNotDependOnTheScalesOfOtherKeys) {
  on_each_kernel("index_topk", [](const Execution& execution) {
    Indexer ix = filled_fp8(32, 150, 37);
    ix.begin.assign(5, 3);
    ix.end.assign(5, 150);
    const Selected expected = select(ix, execution);
    for (const double scale : {0.0, -1.0, kInfinity, kNaN}) {
      ix.k_scale[1] = ix.k_scale[150] = scale;
      expect_same_bits(select(ix, execution), expected);
    }
  });
}

// Large calls look at all scales ahead and take another loop where none is odd.
TEST(IndexTopkFp8, OnCudaScalesOfOtherKeysChangeNoBitOfLargeCalls) {
  if (!has_cuda()) GTEST_SKIP();
  on_each_kernel("index_topk", [](const Execution& execution) {
    if (execution.backend != Backend::cuda) return;
    constexpr std::int64_t kTokens = 1024;
    constexpr std::int64_t kKeys = 65536;
    Indexer ix = filled_fp8(64, 64, 38, kTokens, kKeys);
    ix.begin.assign(kTokens, 3);
    ix.end.assign(kTokens, static_cast<std::int32_t>(kKeys - 1));
    const Selected expected = select(ix, execution);
    ix.k_scale[kKeys - 1] = kNaN;
    expect_same_bits(select(ix, execution), expected);
  });
}

// ---- Backward.

TEST(IndexTopkBackward, InvalidSlotsTouchNothing) {
  on_each_indexer([](const Execution& execution, const Indexer& shape) {
    Indexer ix = with_selection(filled(shape, 41), execution);
    ix.d_k_before = normals(static_cast<std::int64_t>(ix.k.size()), 41, "d_k");
    Indexer spoilt = ix;
    for (std::int64_t t = 0; t < ix.tokens; ++t)
      for (std::int64_t j = 0; j < ix.topk; ++j) {
        const std::int64_t i = t * ix.topk + j;
        if (j % 3 == 0) {  // an invalid index, or one outside the window
          ix.indices[i] = -1;
          const std::int32_t outside = ix.begin[t] > 0 ? ix.begin[t] - 1 : kMaxInt32;
          spoilt.indices[i] = j % 2 == 0 ? outside : ix.end[t];
        }
        if (ix.indices[i] == -1) spoilt.d_scores[i] = j % 2 == 0 ? kNaN : kInfinity;
      }
    expect_same_bits(backward(spoilt, deterministic(execution)),
                     backward(ix, deterministic(execution)));

    // The same for slots past lengths.
    Indexer cut = ix;
    for (std::int64_t t = 0; t < ix.tokens; ++t) {
      spoilt.lengths[t] = cut.lengths[t] = std::min(ix.lengths[t], 2);
      for (std::int64_t j = 2; j < ix.topk; ++j) {
        spoilt.d_scores[t * ix.topk + j] = kNaN;
        cut.d_scores[t * ix.topk + j] = 0;
      }
    }
    expect_same_bits(backward(spoilt, deterministic(execution)),
                     backward(cut, deterministic(execution)));
  });
}

TEST(IndexTopkBackward, FollowsTheFormulaExactly) {
  // With integers gradients are bitwise exact, including the subgradient 0 at 0.
  on_each_indexer([](const Execution& execution, const Indexer& shape) {
    const Indexer ix = with_selection(filled_exactly(shape, 42), execution);
    IndexGradients expected{Values(ix.q.size()), Values(ix.weights.size()), Values(ix.k.size())};
    for (std::int64_t t = 0; t < ix.tokens; ++t)
      for (std::int64_t j = 0; j < ix.lengths[t]; ++j)
        for (std::int64_t h = 0; h < ix.heads; ++h) {
          const double* q = &ix.q[(t * ix.heads + h) * ix.dim];
          const double* k = &ix.k[ix.indices[t * ix.topk + j] * ix.dim];
          double a = 0;
          for (std::int64_t d = 0; d < ix.dim; ++d) a += q[d] * k[d];
          if (a <= 0) continue;
          const double g = ix.d_scores[t * ix.topk + j];
          const double gw = g * ix.weights[t * ix.heads + h];
          expected.d_weights[t * ix.heads + h] += g * a;
          for (std::int64_t d = 0; d < ix.dim; ++d) {
            expected.d_q[(t * ix.heads + h) * ix.dim + d] += gw * k[d];
            expected.d_k[ix.indices[t * ix.topk + j] * ix.dim + d] += gw * q[d];
          }
        }
    const IndexGradients actual = backward(ix, execution);
    EXPECT_TRUE(ok(harness::compare_exactly("d_q", actual.d_q, as_stored(ix.dtype, expected.d_q))));
    EXPECT_TRUE(ok(harness::compare_exactly("d_weights", actual.d_weights, expected.d_weights)));
    EXPECT_TRUE(ok(harness::compare_exactly("d_k", actual.d_k, expected.d_k)));
  });
}

TEST(IndexTopkBackward, DKOfTheAccumulationTypeIsAddedToAndOthersOverwritten) {
  on_each_kernel("index_topk", [](const Execution& execution) {
    for (const DType dtype : {DType::bf16, DType::f16}) {
      Indexer ix = with_selection(filled_exactly({.dtype = dtype}, 43), execution);
      const IndexGradients alone = backward(ix, execution);
      ix.d_k_before = whole_numbers(static_cast<std::int64_t>(ix.k.size()), 43, "d_k", -9, 9);
      IndexGradients sum = alone;
      for (std::size_t i = 0; i < sum.d_k.size(); ++i) sum.d_k[i] += ix.d_k_before[i];
      EXPECT_TRUE(ok(harness::compare_exactly("d_k", backward(ix, execution).d_k, sum.d_k)));
      ix.d_k_type = dtype;
      EXPECT_TRUE(ok(harness::compare_exactly("d_k", backward(ix, execution).d_k,
                                              as_stored(dtype, alone.d_k))));
    }
  });
}

// Pairs are factors that were rounded, in d_q and d_k, and are added in another order in d_weights:
// else nothing would show which of the two kernels ran.
TEST(IndexTopkBackward, OfPairsOfBf16DiffersFromThatOfFloats) {
  const Execution pairs{.backend = Backend::cpu, .kernel = "avx512_bf16"};
  const Execution floats_alone{.backend = Backend::cpu, .kernel = "simd"};
  const Indexer ix =
      with_selection(filled({.keys = 200, .heads = 32, .dim = 128, .topk = 150}, 49), floats_alone);
  const IndexBackwardWork work(ix, {});
  if (!is_taken(work.args, pairs)) GTEST_SKIP() << why_not(work.args, pairs);
  const IndexGradients rounded = backward(ix, pairs);
  const IndexGradients exact = backward(ix, floats_alone);
  expect_close(ix, rounded, exact);
  EXPECT_FALSE(same_bits(rounded.d_q, exact.d_q));
  EXPECT_FALSE(same_bits(rounded.d_weights, exact.d_weights));
  EXPECT_FALSE(same_bits(rounded.d_k, exact.d_k));
}

TEST(IndexTopkBackward, RowsOfDQAndDWeightsDoNotDependOnTheirNeighbours) {
  on_each_indexer([](const Execution& execution, const Indexer& shape) {
    const Indexer ix = with_selection(filled(shape, 44), execution);
    const IndexGradients together = backward(ix, execution);
    for (std::int64_t t = 0; t < ix.tokens; ++t) {
      const IndexGradients alone = backward(rows_of(ix, t, 1), execution);
      const std::int64_t row = ix.heads * ix.dim;
      EXPECT_TRUE(same_bits(alone.d_q, part(together.d_q, t * row, row)));
      EXPECT_TRUE(same_bits(alone.d_weights, part(together.d_weights, t * ix.heads, ix.heads)));
    }
  });
}

TEST(IndexTopkBackward, DeterministicCallsGiveTheSameBitsWhateverTheThreads) {
  on_each_indexer([](const Execution& execution, const Indexer& shape) {
    const Indexer ix = with_selection(filled(shape, 45), execution);
    const IndexGradients first = backward(ix, deterministic(execution));
    for (const int threads : {0, 1, 2, 5, 1024})
      expect_same_bits(backward(ix, on_threads(threads, deterministic(execution))), first);
    expect_close(ix, backward(ix, execution), first);
  });
}

TEST(IndexTopkBackward, TermsThatAreNotPositiveAddNothingWhateverTheyHold) {
  on_each_indexer([](const Execution& execution, const Indexer& shape) {
    Indexer finite = with_selection(filled_exactly(shape, 48), execution);
    for (Values* factors : {&finite.weights, &finite.d_scores})
      for (double& factor : *factors) factor = factor == 0 ? 1 : factor;  // 0 * inf is no sum
    // Of these keys, and of this head, some products are infinite, some -infinite and some NaN.
    for (const double value : {kInfinity, -kInfinity, kNaN}) {
      Indexer ix = finite;
      ix.k[ix.indices[0] * ix.dim + 1] = value;
      ix.k[ix.indices[3] * ix.dim + ix.dim - 1] = -value;
      ix.q[ix.heads * ix.dim + 2] = value;
      expect_close(ix, backward(ix, execution), backward(ix, on(Backend::reference)));
      expect_same_bits(backward(ix, deterministic(execution)),
                       backward(ix, deterministic(execution)));
    }
  });
}

TEST(IndexTopkBackward, TakesMoreThan65535Rows) {
  on_each_kernel("index_topk", [](const Execution& execution) {
    const Indexer ix = with_selection(many_rows(46), execution);
    const IndexGradients gradients = backward(ix, execution);
    for (const std::int64_t t : {0, 65535, 65536, 69999}) {
      const IndexGradients alone = backward(rows_of(ix, t, 1), execution);
      EXPECT_TRUE(same_bits(part(gradients.d_q, t * ix.dim, ix.dim), alone.d_q));
      EXPECT_TRUE(same_bits(part(gradients.d_weights, t, 1), alone.d_weights));
    }
  });
}

TEST(IndexTopkBackward, ElementsMayLiePast31Bits) {
  on_each_kernel("index_topk", [](const Execution& execution) {
    const Indexer ix = with_selection(filled({.tokens = 3, .keys = 9, .topk = 4}, 47), execution);
    const IndexBackwardWork work(ix, harness::device_of(execution.backend));
    {
      const FarTensor q(work.args.q), k(work.args.k), indices(work.args.indices),
          d_scores(work.args.d_scores), d_q(work.args.d_q), d_k(work.args.d_k);
      if (!q || !k || !indices || !d_scores || !d_q || !d_k)
        GTEST_SKIP() << "no room for a large range of addresses";
      IndexTopkBackward far = work.args;
      far.q = q.tensor();
      far.k = k.tensor();
      far.indices = indices.tensor();
      far.d_scores = d_scores.tensor();
      far.d_q = d_q.tensor();
      far.d_k = d_k.tensor();
      run_where_taken(far, deterministic(execution));
      d_q.download_all();
      d_k.download_all();
    }
    expect_close(ix, work.gradients(), backward(ix, deterministic(execution)));
  });
}

}  // namespace
}  // namespace winnow::tests
