// SPDX-License-Identifier: Apache-2.0
// index_topk on scores as models make them: correlated, with ties, of any distribution. Rows are
// short and long, and around the lengths at which a backend changes its method.
#include <cstdint>
#include <string>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "harness/families.h"
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

void expect_exact(std::int64_t keys, std::int64_t topk) {
  on_each_kernel("index_topk", [&](const Execution& execution) {
    for (const ScorePattern pattern : kPatterns) {
      const harness::Case c = case_of(pattern, keys, topk);
      SCOPED_TRACE(c.name);
      for (const harness::Report& report : harness::check("index_topk", c, execution, /*seed=*/1))
        EXPECT_TRUE(report.ok) << harness::line(report);
    }
  });
}

TEST(ScorePatterns, OfShortRowsAreSelectedExactly) { expect_exact(300, 64); }
TEST(ScorePatterns, OfLongRowsAreSelectedExactly) { expect_exact(4200, 300); }

// A thread block holds up to 4096 keys of a row, or 8192 where there are many slots.
TEST(SlowScorePatterns, AroundTheBordersAreSelectedExactly) {
  for (const std::int64_t keys : {4095, 4096, 4097, 4101, 6144, 8191, 8192, 8193, 20011})
    for (const std::int64_t topk : {1, 2048, 2304, 2305, 4608, 4609}) expect_exact(keys, topk);
}
TEST(SlowScorePatterns, OfVeryLongRowsAreSelectedExactly) { expect_exact(140001, 2048); }

}  // namespace
}  // namespace winnow::tests
