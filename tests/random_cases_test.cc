// SPDX-License-Identifier: Apache-2.0
// Every op on small cases of the harness with random options.
#include <cstdint>
#include <string>
#include <string_view>

#include "harness/cases.h"
#include "harness/families.h"
#include "tests/random_calls.h"

namespace winnow::tests {
namespace {

constexpr std::uint64_t kCases = 60;
constexpr std::uint64_t kSlowCases = 400;  // these included

/// A small case with random options. Gradients are compared by their norm, which for a few numbers
/// may be tiny by cancellation: so there are some rows, keys and heads at least, and extreme sinks
/// come with more heads.
harness::Case random_case(std::uint64_t seed) {
  CallMaker m(seed, {});
  harness::Case c;
  c.dtype = activation(m);
  c.name = fmt::format("random-{}", seed);
  c.rows = m.between(30, 60);
  c.tokens = m.perhaps() ? c.rows : m.between(20, 30);
  c.documents = m.between(1, 6);
  if (m.below(4) == 0) c.batch = m.between(1, 3);
  c.heads = m.between(4, 8);
  c.qk_dim = 8 * m.between(1, 6);
  c.v_dim = m.perhaps() ? c.qk_dim : 8 * m.between(1, c.qk_dim / 8);
  if (m.perhaps()) c.ratio = static_cast<std::int32_t>(m.between(2, 5));
  if (c.ratio > 1) c.window = static_cast<std::int32_t>(m.between(0, 6));
  c.topk = c.window + m.between(8, 20);
  c.index_heads = m.between(1, 5);
  c.index_dim = 8 * m.between(1, 4);
  c.head_dim = m.between(0, 9);
  c.scale = c.v_dim == c.qk_dim && m.perhaps() ? 0.0F : 0.2F;
  c.sink = m.perhaps();
  c.slots = static_cast<harness::Slots>(m.below(4));
  c.holes = m.below(3) == 0;
  c.no_valid_slot = m.below(10) == 0;
  c.lengths = m.perhaps();
  c.empty_rows = m.below(4) == 0;
  c.padded = m.below(3) == 0;
  c.extreme_sinks = c.sink && c.heads >= 5 && m.below(4) == 0;
  c.extras = m.perhaps();
  c.exact_scores = m.below(3) == 0;
  c.nan_keys = m.below(4) == 0;
  c.row_padding = m.one_of<std::int64_t>({0, 0, 3, 8});
  return c;
}

void expect_agreement(std::string_view op, std::uint64_t begin, std::uint64_t end) {
  on_each_kernel(op, [&](const Execution& execution) {
    for (std::uint64_t seed = begin; seed < end && !::testing::Test::HasFailure(); ++seed) {
      SCOPED_TRACE(fmt::format("seed {}", seed));
      for (const harness::Report& report : harness::check(op, random_case(seed), execution, seed))
        EXPECT_TRUE(report.ok) << harness::line(report);
    }
  });
}

class RandomCases : public ::testing::TestWithParam<std::string_view> {};
class SlowRandomCases : public RandomCases {};

TEST_P(RandomCases, AgreeWithTheOracle) { expect_agreement(GetParam(), 0, kCases); }

TEST_P(SlowRandomCases, AgreeWithTheOracle) { expect_agreement(GetParam(), kCases, kSlowCases); }

constexpr auto op_name = [](const auto& info) { return std::string(info.param); };
INSTANTIATE_TEST_SUITE_P(Ops, RandomCases, ::testing::ValuesIn(harness::ops()), op_name);
INSTANTIATE_TEST_SUITE_P(Ops, SlowRandomCases, ::testing::ValuesIn(harness::ops()), op_name);

}  // namespace
}  // namespace winnow::tests
