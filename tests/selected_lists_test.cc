// SPDX-License-Identifier: Apache-2.0
// The index lists that `winnow bench --slots selected` attends to.
#include "harness/selected_lists.h"

#include <algorithm>
#include <iterator>
#include <span>

#include "tests/testing.h"

namespace winnow::tests {
namespace {

constexpr std::int64_t kRows = 200;
constexpr std::int64_t kKeys = 8192;
constexpr std::int64_t kTopk = 512;

/// The share of its keys that a list has in common with another.
double common(std::span<const std::int32_t> a, std::span<const std::int32_t> b) {
  std::vector<std::int32_t> both;
  std::set_intersection(a.begin(), a.end(), b.begin(), b.end(), std::back_inserter(both));
  return static_cast<double>(both.size()) / static_cast<double>(a.size());
}

TEST(SelectedLists, AscendAmongTheKeysUpToTheirRows) {
  const std::vector<std::int32_t> lists = harness::selected_lists(1, kRows, kKeys, kTopk);
  for (std::int64_t t = 0; t < kRows; ++t) {
    const auto list = std::span(lists).subspan(t * kTopk, kTopk);
    EXPECT_GE(list.front(), 0);
    EXPECT_LE(list.back(), kKeys - kRows + t);
    EXPECT_TRUE(std::adjacent_find(list.begin(), list.end(), std::greater_equal<>()) == list.end());
  }
}

TEST(SelectedLists, OfRowsNearEachOtherAreAlike) {
  for (const std::uint64_t seed : {1, 2, 3}) {
    const std::vector<std::int32_t> lists = harness::selected_lists(seed, kRows, kKeys, kTopk);
    const auto common_of_rows_apart = [&](std::int64_t distance) {
      double sum = 0;
      for (std::int64_t t = 0; t + distance < kRows; ++t)
        sum += common(std::span(lists).subspan(t * kTopk, kTopk),
                      std::span(lists).subspan((t + distance) * kTopk, kTopk));
      return sum / static_cast<double>(kRows - distance);
    };
    EXPECT_GT(common_of_rows_apart(1), 0.6);
    EXPECT_GT(common_of_rows_apart(66), 0.4);
    EXPECT_LT(common_of_rows_apart(66), common_of_rows_apart(1));
  }
}

TEST(SelectedLists, OfFewKeysEndWithEmptySlots) {
  // The first row is in front of the document.
  EXPECT_EQ(harness::selected_lists(1, 4, 3, 3), (Ints{0, -1, -1, 0, -1, -1, 0, 1, -1, 0, 1, 2}));
  EXPECT_EQ(harness::selected_lists(1, 2, 0, 3), Ints(6, -1));
}

}  // namespace
}  // namespace winnow::tests
