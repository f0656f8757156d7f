// SPDX-License-Identifier: Apache-2.0
// index_topk on scores as models make them: correlated, with ties, of any distribution. Rows are
// short and long, and around the lengths at which a backend changes its method.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "harness/backends.h"
#include "harness/families.h"
#include "harness/index_topk.h"
#include "tests/testing.h"

namespace winnow::tests {
namespace {

using harness::ScorePattern;

constexpr ScorePattern kPatterns[] = {
    ScorePattern::independent,  ScorePattern::smooth10,  ScorePattern::smooth1000,
    ScorePattern::recency,      ScorePattern::reversed,  ScorePattern::outliers,
    ScorePattern::ties,         ScorePattern::blocks,    ScorePattern::equal,
    ScorePattern::zero_weights, ScorePattern::half_nan,  ScorePattern::one_sign,
    ScorePattern::clusters,     ScorePattern::last_bits,
};

/// One document whose last rows select; the shape is one that every kernel takes.
harness::Case case_of(ScorePattern pattern, std::int64_t keys, std::int64_t topk) {
  return {.name = fmt::format("pattern {}, {} keys", static_cast<int>(pattern), keys),
          .tokens = 3,
          .rows = keys,
          .documents = 1,
          .topk = topk,
          .index_heads = 2,
          .index_dim = 128,
          .score_pattern = pattern};
}

/// What is tested side by side: most of it is work of one thread.
using Trials = std::vector<std::function<void()>>;

/// Threads take trials, each the next one.
void run_all(const Trials& trials) {
  std::atomic<std::size_t> next = 0;
  std::vector<std::jthread> threads(std::clamp(std::thread::hardware_concurrency(), 1U, 16U));
  for (std::jthread& thread : threads) {
    thread = std::jthread([&] {
      for (std::size_t i = next++; i < trials.size(); i = next++) {
        try {
          trials[i]();
        } catch (const std::exception& error) {
          ADD_FAILURE() << error.what();
        }
      }
    });
  }
}

std::string name_of(const harness::Case& c, const Execution& execution) {
  return fmt::format("{} {}, {}", name(execution.backend),
                     execution.kernel == nullptr ? "" : execution.kernel, c.name);
}

/// Judges selection, scores, replay and gradients by the oracle.
void add_checks(Trials& trials, std::span<const ScorePattern> patterns, std::int64_t keys,
                std::int64_t topk) {
  on_each_kernel("index_topk", [&](const Execution& execution) {
    for (const ScorePattern pattern : patterns) {
      trials.push_back([c = case_of(pattern, keys, topk), execution] {
        SCOPED_TRACE(name_of(c, execution));
        for (const harness::Report& report : harness::check("index_topk", c, execution, 1))
          EXPECT_TRUE(report.ok) << harness::line(report);
      });
    }
  });
}

// ---- The best of a kernel's own scores.

/// The slots of some rows.
struct Slots {
  Slots(Device device, std::int64_t rows, std::int64_t topk)
      : indices(device, DType::i32, {rows, topk}),
        lengths(device, DType::i32, {rows}),
        scores(device, DType::f32, {rows, topk}) {}
  Buffer indices, lengths, scores;
};

/// Selects from the inputs of `inputs`; false if the kernel does not take them.
bool select(IndexTopkForward inputs, SlotOrder order, const Slots& slots, const Execution& asked) {
  inputs.indices = slots.indices.tensor();
  inputs.lengths = slots.lengths.tensor();
  inputs.scores = slots.scores.tensor();
  inputs.order = order;
  if (!is_taken(inputs, asked)) return false;
  run(inputs, harness::for_operator<IndexTopkForward>(asked));
  return true;
}

struct Scored {
  std::int32_t key;
  double score;
};

/// Expects that the slots hold the best of each row's keys, given in the order of selection.
void expect_best(const std::vector<std::vector<Scored>>& ranked, std::int64_t topk, SlotOrder order,
                 const Slots& slots) {
  Ints indices, lengths;
  Values scores;
  for (const std::vector<Scored>& row : ranked) {
    const auto count = std::min(topk, static_cast<std::int64_t>(row.size()));
    std::vector<Scored> best(row.begin(), row.begin() + count);
    if (order == SlotOrder::ascending)
      std::sort(best.begin(), best.end(), [](auto& a, auto& b) { return a.key < b.key; });
    best.resize(static_cast<std::size_t>(topk), Scored{-1, -kInfinity});
    for (const Scored& each : best) {
      indices.push_back(each.key);
      scores.push_back(each.score);
    }
    lengths.push_back(static_cast<std::int32_t>(count));
  }
  EXPECT_TRUE(slots.indices.download_ints() == indices);
  EXPECT_TRUE(slots.lengths.download_ints() == lengths);
  EXPECT_TRUE(same_bits(slots.scores.download(), scores));
  expect_canaries_intact(slots.indices, slots.lengths, slots.scores);
}

/// A slot for each key shows the scores that the kernel computes, of which fewer slots have to hold
/// the best.
void expect_best_of_own_scores(const harness::Case& c, const Execution& execution, bool fp8,
                               std::span<const std::int64_t> topks) {
  SCOPED_TRACE(name_of(c, execution));
  const Device device = harness::device_of(execution.backend);
  const harness::IndexTopkWork work(c, {.device = device}, /*seed=*/1, fp8);
  const std::int64_t keys = c.index_keys();
  const Slots all(device, c.tokens, keys);
  if (!select(work.forward, SlotOrder::ascending, all, execution)) return;
  const Ints key = all.indices.download_ints();
  const Values score = all.scores.download();
  std::vector<std::vector<Scored>> ranked(static_cast<std::size_t>(c.tokens));
  for (std::size_t i = 0; i < key.size(); ++i)
    if (key[i] >= 0) ranked[i / static_cast<std::size_t>(keys)].push_back({key[i], score[i]});
  for (std::vector<Scored>& row : ranked)
    std::stable_sort(row.begin(), row.end(), [](auto& a, auto& b) { return a.score > b.score; });
  for (const std::int64_t topk : topks) {
    SCOPED_TRACE(fmt::format("{} slots{}", topk, fp8 ? ", fp8" : ""));
    const Slots slots(device, c.tokens, topk);
    for (const SlotOrder order : {SlotOrder::ascending, SlotOrder::by_score}) {
      ASSERT_TRUE(select(work.forward, order, slots, execution));
      expect_best(ranked, topk, order, slots);
    }
  }
}

void add_own_scores(Trials& trials, std::int64_t keys, const std::vector<std::int64_t>& topks) {
  on_each_kernel("index_topk", [&](const Execution& execution) {
    for (const ScorePattern pattern : kPatterns) {
      for (const bool fp8 : {false, true}) {
        trials.push_back([c = case_of(pattern, keys, 1), execution, fp8, topks] {
          expect_best_of_own_scores(c, execution, fp8, topks);
        });
      }
    }
  });
}

TEST(ScorePatterns, OfShortRowsAreSelectedExactly) {
  Trials trials;
  add_checks(trials, kPatterns, 300, 64);
  add_own_scores(trials, 300, {1, 64, 299, 300, 301});
  run_all(trials);
}
TEST(ScorePatterns, OfLongRowsAreSelectedExactly) {
  Trials trials;
  add_checks(trials, kPatterns, 4200, 300);
  add_own_scores(trials, 4200, {300});
  run_all(trials);
}

// A thread block holds up to 4096 keys of a row, or 8192 where there are many slots. Scores and
// gradients know no such borders.
TEST(SlowScorePatterns, AroundTheBordersAreSelectedExactly) {
  Trials trials;
  for (const std::int64_t keys : {20011, 8193, 8192, 8191, 6144, 4101, 4097, 4096, 4095})
    add_own_scores(trials, keys, {1, 2048, 2304, 2305, 4608, 4609});
  for (const std::int64_t keys : {4097, 8193}) add_checks(trials, kPatterns, keys, 2048);
  run_all(trials);
}
TEST(SlowScorePatterns, OfVeryLongRowsAreSelectedExactly) {
  constexpr ScorePattern kSome[] = {ScorePattern::independent, ScorePattern::blocks,
                                    ScorePattern::ties, ScorePattern::half_nan};
  Trials trials;
  add_checks(trials, kSome, 140001, 2048);
  add_own_scores(trials, 140001, {2048});
  run_all(trials);
}

}  // namespace
}  // namespace winnow::tests
