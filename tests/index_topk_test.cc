// SPDX-License-Identifier: Apache-2.0
// index_topk: the selection is exact on every input. With integer inputs the scores are exact too.
#include <cmath>
#include <limits>

#include "tests/indexer_calls.h"

namespace winnow::tests {
namespace {

/// One head of width 8 and one row over all keys; the score of key s is weight * max(scores[s], 0).
Indexer with_scores(const Values& scores, std::int64_t topk, double weight = 1,
                    DType dtype = DType::f32) {
  const auto keys = static_cast<std::int64_t>(scores.size());
  Indexer ix{.tokens = 1, .keys = keys, .heads = 1, .dim = 8, .topk = topk, .dtype = dtype};
  ix.q = {1, 0, 0, 0, 0, 0, 0, 0};
  ix.weights = {weight};
  for (const double score : scores) {
    ix.k.push_back(score);
    ix.k.insert(ix.k.end(), 7, 0);
  }
  ix.begin = {0};
  ix.end = {static_cast<std::int32_t>(keys)};
  return ix;
}

TEST(IndexTopk, SelectsTheLargestWithTiesToTheSmallerKey) {
  on_each_indexer([](const Execution& execution, const Indexer& shape) {
    for (std::uint64_t seed = 0; seed < 10; ++seed) {
      SCOPED_TRACE(seed);
      const Indexer ix = filled_exactly(shape, seed);
      expect_selected(select(ix, execution), plain_selection(ix));
    }
  });
}

TEST(IndexTopk, IsExactForEveryK) {
  on_each_kernel("index_topk", [](const Execution& execution) {
    for (const std::int64_t topk : {1, 7, 100, 2048, 4096, 65536}) {
      SCOPED_TRACE(topk);
      Indexer ix{.tokens = 4, .keys = topk + topk / 2 + 13, .heads = 2, .dim = 8, .topk = topk};
      ix = filled_exactly(ix, static_cast<std::uint64_t>(topk));
      expect_selected(select(ix, execution), plain_selection(ix));
    }
  });
}

TEST(IndexTopk, TakesAnyNumberOfHeadsAndAnyWidth) {
  on_each_kernel("index_topk", [](const Execution& execution) {
    for (const std::int64_t heads : {1, 2, 7, 24, 33, 64, 96, 128, 161})
      for (const std::int64_t dim : {8, 24, 128, 136, 264}) {
        SCOPED_TRACE(fmt::format("{} heads of {}", heads, dim));
        const Indexer ix =
            filled_exactly({.tokens = 3, .keys = 19, .heads = heads, .dim = dim, .topk = 5}, 3);
        expect_selected(select(ix, execution), plain_selection(ix));
      }
  });
}

TEST(IndexTopk, OfEqualScoresTakesTheFirstKeys) {
  on_each_kernel("index_topk", [](const Execution& execution) {
    for (const double weight : {1.0, -1.0, 0.0}) {
      Indexer ix = with_scores(Values(300, 5), 100, weight);
      ix.begin = {17};
      const Selected selected = select(ix, execution);
      Ints expected(100);
      for (std::int32_t j = 0; j < 100; ++j) expected[j] = 17 + j;
      EXPECT_EQ(selected.indices, expected);
      EXPECT_TRUE(ok(harness::compare_exactly("scores", selected.scores, Values(100, 5 * weight))));
    }
  });
}

TEST(IndexTopk, CutsAPlateauOfZerosByKey) {
  // Three scores above 0, many exact zeros, a few below: heads 0 and 1 have weights of both signs.
  on_each_kernel("index_topk", [](const Execution& execution) {
    Indexer ix = with_scores(Values(200, 0), 20);
    ix.heads = 2;
    ix.q = {1, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0};
    ix.weights = {1, -1};
    for (const std::int64_t above : {50, 120, 199}) ix.k[above * 8] = 3;
    for (const std::int64_t below : {0, 5, 90}) ix.k[below * 8 + 1] = 2;
    for (const std::int64_t zero : {1, 60, 61}) ix.k[zero * 8] = -4;  // max(a, 0) is 0
    const Selected selected = select(ix, execution);
    Ints expected = {1, 2, 3, 4, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 50, 120, 199};
    EXPECT_EQ(selected.indices, expected);
    expect_selected(selected, plain_selection(ix));
  });
}

TEST(IndexTopk, OrdersNegativeScores) {
  on_each_kernel("index_topk", [](const Execution& execution) {
    const Indexer ix = with_scores({3, 1, 4, 1, 5, 9, 2, 6}, 3, -2);
    const Selected selected = select(ix, execution);
    EXPECT_EQ(selected.indices, (Ints{1, 3, 6}));
    EXPECT_EQ(selected.scores, (Values{-2, -2, -4}));
  });
}

TEST(IndexTopk, TakesZerosOfBothSignsAsEqual) {
  // A head of weight +0 or -0 adds a zero of that sign to scores that are 0 otherwise.
  on_each_kernel("index_topk", [](const Execution& execution) {
    for (const double weight : {0.0, -0.0, -1.0}) {
      Indexer ix = with_scores({-1, 0, -0.0, -5, 0, -0.0, 7}, 4, weight);
      const Selected selected = select(ix, execution);
      EXPECT_EQ(selected.indices, (Ints{0, 1, 2, 3}));
      EXPECT_TRUE(all_zero(selected.scores));
    }
  });
}

TEST(IndexTopk, IsExactAtEveryMagnitude) {
  // The same integers at magnitudes from denormal scores to 1e30 and beyond.
  on_each_indexer([](const Execution& execution, const Indexer& shape) {
    const Indexer ix = filled_exactly(shape, 8);
    for (const int exponent : {-140, -126, -100, 0, 60, 110}) {
      SCOPED_TRACE(exponent);
      Indexer scaled = ix;
      // The scale is split between q and k, so that the products are tiny or huge.
      for (double& value : scaled.q) value = std::ldexp(value, exponent / 2);
      for (double& value : scaled.k) value = std::ldexp(value, exponent - exponent / 2);
      expect_selected(select(scaled, execution), plain_selection(scaled));
      // The whole scale is in the weights.
      scaled = ix;
      for (double& value : scaled.weights) value = std::ldexp(value, exponent);
      expect_selected(select(scaled, execution), plain_selection(scaled));
    }
  });
}

TEST(IndexTopk, SeparatesNeighbouringFloats) {
  on_each_kernel("index_topk", [](const Execution& execution) {
    // Adjacent floats around 1, permuted by a stride.
    const std::int64_t keys = 257;
    Values scores(keys);
    for (std::int64_t s = 0; s < keys; ++s)
      scores[s] = 1 + static_cast<double>(s * 100 % keys - 128) * 0x1p-23;
    scores[0] = 1 - 128 * 0x1p-23;
    for (const std::int64_t topk : {1, 2, 100, 256}) {
      const Indexer ix = with_scores(scores, topk);
      expect_selected(select(ix, execution), plain_selection(ix));
    }
  });
}

TEST(IndexTopk, FillsShortWindowsUp) {
  on_each_kernel("index_topk", [](const Execution& execution) {
    Indexer ix = filled_exactly({.tokens = 40, .keys = 40, .topk = 64}, 10);
    ix.begin.assign(40, 0);
    for (std::int32_t t = 0; t < 40; ++t) ix.end[t] = t + 1;
    const Selected selected = select(ix, execution);
    for (std::int32_t t = 0; t < 40; ++t) {
      EXPECT_EQ(selected.lengths[t], t + 1);
      for (std::int32_t j = 0; j < 64; ++j)
        EXPECT_EQ(selected.indices[t * 64 + j], j <= t ? j : -1);
      EXPECT_TRUE(all_equal(part(selected.scores, t * 64 + t + 1, 63 - t), -kInfinity));
    }
    expect_selected(selected, plain_selection(ix));
  });
}

TEST(IndexTopk, OfEmptyWindowsIsNothing) {
  on_each_kernel("index_topk", [](const Execution& execution) {
    for (const std::int64_t keys : {0, 10}) {
      Indexer ix = filled_exactly({.tokens = 3, .keys = keys, .topk = 4}, 11);
      ix.begin.assign(3, static_cast<std::int32_t>(keys));
      ix.end = ix.begin;
      const Selected selected = select(ix, execution);
      EXPECT_EQ(selected.lengths, Ints(3, 0));
      EXPECT_EQ(selected.indices, Ints(12, -1));
      EXPECT_TRUE(all_equal(selected.scores, -kInfinity));
    }
  });
}

TEST(IndexTopk, NeverSelectsNan) {
  on_each_indexer([](const Execution& execution, const Indexer& shape) {
    Indexer ix = filled_exactly(shape, 12);
    for (std::int64_t s = 0; s < ix.keys; s += 3) ix.k[s * ix.dim + s % ix.dim] = kNaN;
    const Selected selected = select(ix, execution);
    expect_selected(selected, plain_selection(ix));
    for (const std::int32_t index : selected.indices)
      EXPECT_TRUE(index == -1 || index % 3 != 0) << index;

    // A NaN in one head of a query affects that row and no other.
    Indexer row = filled_exactly(shape, 12);
    row.q[0] = kNaN;
    const Selected of_row = select(row, execution);
    EXPECT_EQ(of_row.lengths[0], 0);
    expect_selected(of_row, plain_selection(row));
  });
}

TEST(IndexTopk, NeverSelectsMinusInfinityAndTakesPlusInfinityFirst) {
  on_each_kernel("index_topk", [](const Execution& execution) {
    const Values scores = {1, kInfinity, 2, -kInfinity, kInfinity, 3};
    Indexer plus = with_scores(scores, 4);
    plus.q.assign(8, 1);  // 0 * inf would be NaN
    Selected selected = select(plus, execution);
    EXPECT_EQ(selected.indices, (Ints{1, 2, 4, 5}));
    EXPECT_EQ(selected.scores, (Values{kInfinity, 2, kInfinity, 3}));
    Indexer minus = plus;
    minus.weights = {-1};
    selected = select(minus, execution);
    EXPECT_EQ(selected.indices, (Ints{0, 2, 3, 5}));
    EXPECT_EQ(selected.lengths, Ints{4});
    minus.topk = 6;
    selected = select(minus, execution);
    EXPECT_EQ(selected.indices, (Ints{0, 2, 3, 5, -1, -1}));
    EXPECT_EQ(selected.lengths, Ints{4});
  });
}

TEST(IndexTopk, AScoreThatOverflowsToMinusInfinityIsNotSelected) {
  // Scores 0.5, -inf, 0.25: two of five slots hold a key.
  on_each_kernel("index_topk", [](const Execution& execution) {
    Indexer ix = with_scores({0.5, 0, 0.25}, 5);
    ix.heads = 2;
    ix.q = {1, 0, 0, 0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0};
    ix.weights = {1, -1};
    ix.k[8 + 1] = 3e38;
    const Selected selected = select(ix, execution);
    EXPECT_EQ(selected.indices, (Ints{0, 2, -1, -1, -1}));
    EXPECT_EQ(selected.scores, (Values{0.5, 0.25, -kInfinity, -kInfinity, -kInfinity}));
  });
}

TEST(IndexTopk, ByScoreListsTheSameKeysBestFirst) {
  on_each_indexer([](const Execution& execution, const Indexer& shape) {
    Indexer ix = filled_exactly(shape, 13);
    ix.order = SlotOrder::by_score;
    expect_selected(select(ix, execution), plain_selection(ix));

    // Also with inexact sums: the slots are those of the other order, sorted.
    ix = filled(shape, 13);
    const Selected ascending = select(ix, execution);
    ix.order = SlotOrder::by_score;
    const Selected by_score = select(ix, execution);
    EXPECT_EQ(by_score.lengths, ascending.lengths);
    for (std::int64_t t = 0; t < ix.tokens; ++t) {
      std::vector<std::pair<double, std::int32_t>> slots;
      for (std::int64_t j = 0; j < ascending.lengths[t]; ++j)
        slots.emplace_back(-ascending.scores[t * ix.topk + j], ascending.indices[t * ix.topk + j]);
      std::sort(slots.begin(), slots.end());
      for (std::size_t j = 0; j < slots.size(); ++j) {
        EXPECT_EQ(by_score.indices[t * ix.topk + j], slots[j].second);
        EXPECT_EQ(by_score.scores[t * ix.topk + j], -slots[j].first);
      }
    }
  });
}

TEST(IndexTopk, LengthsAndScoresAreOptional) {
  on_each_indexer([](const Execution& execution, const Indexer& shape) {
    const Indexer ix = filled(shape, 14);
    const Selected expected = select(ix, execution);
    for (const bool with_lengths : {false, true})
      for (const bool with_scores : {false, true}) {
        IndexForwardWork work(ix, harness::device_of(execution.backend), false);
        if (!with_lengths) work.args.lengths = {};
        if (!with_scores) work.args.scores = {};
        run_where_taken(work.args, execution);
        EXPECT_EQ(work.indices.download_ints(), expected.indices);
        if (with_lengths) {
          EXPECT_EQ(work.lengths.download_ints(), expected.lengths);
        }
        if (with_scores) {
          EXPECT_TRUE(same_bits(work.scores.download(), expected.scores));
        }
        expect_canaries_intact(work.indices, work.lengths, work.scores);
      }
  });
}

/// Extreme values in some rows of each tensor in turn, with a slot for every key.
void expect_the_same_without_scores(const Execution& execution, Indexer shape) {
  shape.topk = shape.keys;
  Indexer ix = filled(shape, 15);
  if (ix.dtype == DType::f8_e4m3) ix.k_scale = Values(static_cast<std::size_t>(ix.keys), 0.5);
  for (Values* const values : {&ix.q, &ix.k, &ix.weights, &ix.k_scale}) {
    const Values unchanged = *values;
    for (const double extreme : {kNaN, kInfinity, -kInfinity, 3e38, 1e30, -1e25, 0.0}) {
      SCOPED_TRACE(fmt::format("{} among {} values", extreme, values->size()));
      for (std::size_t i = 3; i < values->size(); i += 5 + values->size() / 3)
        (*values)[i] = extreme;
      const Selected expected = select(ix, execution);
      IndexForwardWork work(ix, harness::device_of(execution.backend), false);
      work.args.scores = {};
      run_where_taken(work.args, execution);
      EXPECT_EQ(work.indices.download_ints(), expected.indices);
      EXPECT_EQ(work.lengths.download_ints(), expected.lengths);
      expect_canaries_intact(work.indices, work.lengths);
      *values = unchanged;
    }
  }
}

TEST(IndexTopk, SelectsTheSameWithoutScoresWhateverTheInputs) {
  on_each_indexer(expect_the_same_without_scores);
  on_each_kernel("index_topk", [](const Execution& execution) {
    expect_the_same_without_scores(
        execution, {.tokens = 9, .keys = 300, .heads = 8, .dim = 128, .dtype = DType::f8_e4m3});
    expect_the_same_without_scores(execution, {.keys = 300, .heads = 8, .dtype = DType::f16});
  });
}

TEST(IndexTopk, ScoresAreCloseToTheFormula) {
  on_each_indexer([](const Execution& execution, const Indexer& shape) {
    const Indexer ix = filled(shape, 15);
    const Selected selected = select(ix, execution);
    for (std::int64_t t = 0; t < ix.tokens; ++t) {
      const PlainScores scores = plain_scores(ix, t);
      const double error = harness::score_limit(ix.dtype).value * scores.scale;
      double least = kInfinity;
      std::vector<bool> chosen(static_cast<std::size_t>(ix.keys), false);
      for (std::int64_t j = 0; j < selected.lengths[t]; ++j) {
        const std::int32_t key = selected.indices[t * ix.topk + j];
        chosen[key] = true;
        least = std::min(least, selected.scores[t * ix.topk + j]);
        EXPECT_NEAR(selected.scores[t * ix.topk + j], scores.of_key[key], error);
      }
      EXPECT_EQ(selected.lengths[t], std::min<std::int64_t>(ix.topk, ix.end[t] - ix.begin[t]));
      for (std::int32_t s = ix.begin[t]; s < ix.end[t]; ++s)
        if (!chosen[s]) {
          EXPECT_LE(scores.of_key[s], least + 2 * error);
        }
    }
  });
}

}  // namespace
}  // namespace winnow::tests
