// SPDX-License-Identifier: Apache-2.0
// key_windows: golden values, padding, pools, and windows against the definition of visible keys.
#include "tests/testing.h"

namespace winnow::tests {
namespace {

/// One call as plain vectors.
struct Packed {
  Ints cu_seqlens;
  Ints padded{};      // empty: absent
  Ints query_rows{};  // empty: absent, then there are `tokens` rows
  std::int64_t tokens = 0;
  std::int32_t ratio = 1;
  PaddingRows padding_rows = PaddingRows::empty;
};

struct Windows {
  Ints begin, end;
  bool operator==(const Windows&) const = default;

  Ints lengths() const {
    Ints result;
    for (std::size_t t = 0; t < begin.size(); ++t) result.push_back(end[t] - begin[t]);
    return result;
  }
};

void PrintTo(const Windows& windows, std::ostream* stream) {
  *stream << "begin " << ::testing::PrintToString(windows.begin) << " end "
          << ::testing::PrintToString(windows.end);
}

Windows windows_of(const Packed& packed, Backend backend) {
  const Device device = harness::device_of(backend);
  const auto size = [](const Ints& values) { return static_cast<std::int64_t>(values.size()); };
  const std::int64_t tokens = packed.query_rows.empty() ? packed.tokens : size(packed.query_rows);
  const Buffer cu_seqlens = ints(device, {size(packed.cu_seqlens)}, packed.cu_seqlens);
  Buffer padded, query_rows;
  if (!packed.padded.empty()) padded = ints(device, {size(packed.padded)}, packed.padded);
  if (!packed.query_rows.empty()) query_rows = ints(device, {tokens}, packed.query_rows);
  const Buffer begin(device, DType::i32, {tokens});
  const Buffer end(device, DType::i32, {tokens});
  key_windows({.cu_seqlens = cu_seqlens.tensor(),
               .cu_seqlens_padded = padded.tensor(),
               .query_rows = query_rows.tensor(),
               .ratio = packed.ratio,
               .padding_rows = packed.padding_rows,
               .begin = begin.tensor(),
               .end = end.tensor()},
              on(backend));
  expect_canaries_intact(cu_seqlens, padded, query_rows, begin, end);
  return {begin.download_ints(), end.download_ints()};
}

/// Expects these windows on every backend.
void expect_windows(const Packed& packed, const Windows& expected) {
  on_each_backend([&](Backend backend) { EXPECT_EQ(windows_of(packed, backend), expected); });
}

void expect_lengths(const Packed& packed, const Ints& expected) {
  on_each_backend(
      [&](Backend backend) { EXPECT_EQ(windows_of(packed, backend).lengths(), expected); });
}

TEST(KeyWindows, OfCompactDocumentsAreCausal) {
  expect_windows({.cu_seqlens = {0, 3, 5}, .tokens = 5},
                 {.begin = {0, 0, 0, 3, 3}, .end = {1, 2, 3, 4, 5}});
}

TEST(KeyWindows, OfPaddedDocumentsLeavePaddingOut) {
  expect_windows({.cu_seqlens = {0, 2, 5}, .padded = {0, 4, 8}, .tokens = 8},
                 {.begin = {0, 0, 0, 0, 4, 4, 4, 4}, .end = {1, 2, 0, 0, 5, 6, 7, 4}});
}

TEST(KeyWindows, PaddingRowsMaySeeTheirDocument) {
  expect_windows({.cu_seqlens = {0, 2, 5},
                  .padded = {0, 4, 8},
                  .tokens = 8,
                  .padding_rows = PaddingRows::see_document},
                 {.begin = {0, 0, 0, 0, 4, 4, 4, 4}, .end = {1, 2, 2, 2, 5, 6, 7, 7}});
}

TEST(KeyWindows, APaddingRowOfAnEmptyDocumentMaySeeOneKey) {
  expect_windows({.cu_seqlens = {0, 0, 1},
                  .padded = {0, 2, 4},
                  .tokens = 4,
                  .padding_rows = PaddingRows::see_document},
                 {.begin = {0, 0, 2, 2}, .end = {1, 1, 3, 3}});
  expect_lengths({.cu_seqlens = {0, 0, 1}, .padded = {0, 2, 4}, .tokens = 4}, {0, 0, 1, 0});
}

TEST(KeyWindows, OfQueryRowsAreThoseOfTheGlobalRows) {
  expect_windows({.cu_seqlens = {0, 2, 5}, .padded = {0, 4, 8}, .query_rows = {1, 4, 6}},
                 {.begin = {0, 4, 4}, .end = {2, 5, 7}});
  // Query rows in any order, and repeated.
  expect_windows({.cu_seqlens = {0, 3, 5}, .query_rows = {4, 0, 4, 2}},
                 {.begin = {3, 0, 3, 0}, .end = {5, 1, 5, 3}});
}

TEST(KeyWindows, OfALocalPartOfAPaddedBatch) {
  expect_lengths(
      {.cu_seqlens = {0, 3, 7, 9}, .padded = {0, 4, 9, 12}, .query_rows = {2, 3, 4, 5, 6, 7, 8, 9}},
      {3, 0, 1, 2, 3, 4, 0, 1});
}

TEST(KeyWindows, PastTheLastDocumentAreEmpty) {
  expect_windows({.cu_seqlens = {0, 3, 5}, .tokens = 8},
                 {.begin = {0, 0, 0, 3, 3, 0, 0, 0}, .end = {1, 2, 3, 4, 5, 0, 0, 0}});
  expect_windows({.cu_seqlens = {0, 3},
                  .query_rows = {2, 3, kMaxInt32},
                  .padding_rows = PaddingRows::see_document},
                 {.begin = {0, 0, 0}, .end = {3, 0, 0}});
  expect_windows({.cu_seqlens = {0}, .tokens = 2}, {.begin = {0, 0}, .end = {0, 0}});
}

TEST(KeyWindows, OfAQueryRowOfMinusOneAreEmpty) {
  for (const PaddingRows mode : {PaddingRows::empty, PaddingRows::see_document})
    expect_windows({.cu_seqlens = {0, 3, 5}, .query_rows = {-1, 4, -1}, .padding_rows = mode},
                   {.begin = {0, 3, 0}, .end = {0, 5, 0}});
}

TEST(KeyWindows, SkipEmptyDocuments) {
  expect_windows({.cu_seqlens = {0, 0, 2, 2, 2, 3, 3}, .tokens = 3},
                 {.begin = {0, 0, 2}, .end = {1, 2, 3}});
}

TEST(KeyWindows, OfNoRowsAreNone) { expect_windows({.cu_seqlens = {0, 3}}, {}); }

TEST(KeyWindows, OfPoolsGrowByWholePools) {
  // Documents of 9, 3 and 4 rows have 2, 0 and 1 pools of 4.
  expect_windows({.cu_seqlens = {0, 9, 12, 16}, .tokens = 16, .ratio = 4},
                 {.begin = {0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 2, 2, 2, 2, 2, 2},
                  .end = {0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 3}});
}

TEST(KeyWindows, OfPoolsCountRealRowsOnly) {
  // 5 of 8 and 4 of 6 rows are real: 2 pools of 2 each; those of the second document begin at 2.
  expect_windows({.cu_seqlens = {0, 5, 9}, .padded = {0, 8, 14}, .tokens = 15, .ratio = 2},
                 {.begin = {0, 0, 0, 0, 0, 0, 0, 0, 2, 2, 2, 2, 2, 2, 0},
                  .end = {0, 1, 1, 2, 2, 0, 0, 0, 2, 3, 3, 4, 2, 2, 0}});
  expect_windows({.cu_seqlens = {0, 5, 9},
                  .padded = {0, 8, 14},
                  .query_rows = {4, 5, 12, 14, -1},
                  .ratio = 2,
                  .padding_rows = PaddingRows::see_document},
                 {.begin = {0, 0, 2, 0, 0}, .end = {2, 2, 4, 0, 0}});
}

TEST(KeyWindows, OfPoolsWiderThanAnyDocumentAreEmpty) {
  expect_lengths({.cu_seqlens = {0, 3, 5}, .tokens = 5, .ratio = 4}, {0, 0, 0, 0, 0});
  expect_lengths({.cu_seqlens = {0, 3, 5}, .tokens = 5, .ratio = kMaxInt32}, {0, 0, 0, 0, 0});
}

TEST(KeyWindows, PoolsOfAnUnpackedSequence) {
  // Position p sees the first (p + 1) div ratio entries.
  Ints expected;
  for (std::int32_t p = 0; p < 40; ++p) expected.push_back((p + 1) / 3);
  expect_lengths({.cu_seqlens = {0, 40}, .tokens = 40, .ratio = 3}, expected);
}

// ---- Properties on random packings.

struct RandomPacking {
  Packed packed;
  std::int64_t rows = 0;  // with padding, and a few after the last document
};

RandomPacking random_packing(std::uint64_t seed) {
  const Random random(seed, "packing");
  std::int64_t draw = 0;
  RandomPacking result{.packed = {.cu_seqlens = {0}, .padded = {0}}};
  const std::int64_t documents = random.below(draw++, 6);
  for (std::int64_t i = 0; i < documents; ++i) {
    const auto real = static_cast<std::int32_t>(random.below(draw++, 9));
    const auto padding = static_cast<std::int32_t>(random.below(draw++, 4));
    result.packed.cu_seqlens.push_back(result.packed.cu_seqlens.back() + real);
    result.packed.padded.push_back(result.packed.padded.back() + real + padding);
  }
  result.rows = result.packed.padded.back() + random.below(draw++, 3);
  result.packed.tokens = result.rows;
  result.packed.ratio = static_cast<std::int32_t>(1 + random.below(draw++, 4));
  return result;
}

TEST(KeyWindows, HoldExactlyTheKeysThatARowMaySee) {
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    SCOPED_TRACE(seed);
    const RandomPacking random = random_packing(seed);
    const Packed& packed = random.packed;
    const std::int32_t ratio = packed.ratio;
    struct Key {
      std::int64_t document, last_row;  // the last row that it covers
    };
    std::vector<Key> keys;  // ratio 1: one per row, including padding; else the pools
    std::vector<std::int64_t> document_of(static_cast<std::size_t>(random.rows), -1);
    std::vector<bool> is_real(static_cast<std::size_t>(random.rows), false);
    for (std::size_t i = 0; i + 1 < packed.padded.size(); ++i) {
      const std::int32_t real = packed.cu_seqlens[i + 1] - packed.cu_seqlens[i];
      for (std::int32_t row = packed.padded[i]; row < packed.padded[i + 1]; ++row) {
        const std::int32_t position = row - packed.padded[i];
        document_of[row] = static_cast<std::int64_t>(i);
        is_real[row] = position < real;
        if (ratio == 1 || (is_real[row] && position % ratio == ratio - 1))
          keys.push_back({static_cast<std::int64_t>(i), row});
      }
    }
    on_each_backend([&](Backend backend) {
      const Windows windows = windows_of(packed, backend);
      for (std::int64_t row = 0; row < random.rows; ++row) {
        for (std::size_t s = 0; s < keys.size(); ++s) {
          const bool may_see = is_real[row] && keys[s].document == document_of[row] &&
                               keys[s].last_row <= row && is_real[keys[s].last_row];
          const auto key = static_cast<std::int32_t>(s);
          ASSERT_EQ(key >= windows.begin[row] && key < windows.end[row], may_see)
              << "row " << row << " key " << s;
        }
        ASSERT_LE(windows.begin[row], windows.end[row]);
        ASSERT_LE(windows.end[row], static_cast<std::int64_t>(keys.size()));
      }
    });
  }
}

TEST(KeyWindows, OfPackedDocumentsEqualEachAlone) {
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    SCOPED_TRACE(seed);
    const Packed packed = random_packing(seed).packed;
    on_each_backend([&](Backend backend) {
      const Windows together = windows_of(packed, backend);
      std::int32_t pools = 0;
      for (std::size_t i = 0; i + 1 < packed.padded.size(); ++i) {
        const std::int32_t real = packed.cu_seqlens[i + 1] - packed.cu_seqlens[i];
        const std::int32_t slots = packed.padded[i + 1] - packed.padded[i];
        const Windows alone = windows_of(
            {.cu_seqlens = {0, real}, .padded = {0, slots}, .tokens = slots, .ratio = packed.ratio},
            backend);
        const std::int32_t shift = packed.ratio == 1 ? packed.padded[i] : pools;
        for (std::int32_t t = 0; t < slots; ++t) {
          ASSERT_EQ(together.begin[packed.padded[i] + t], alone.begin[t] + shift);
          ASSERT_EQ(together.end[packed.padded[i] + t], alone.end[t] + shift);
        }
        pools += real / packed.ratio;
      }
    });
  }
}

TEST(KeyWindows, OfRealRowsAreTheSameInBothModes) {
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    SCOPED_TRACE(seed);
    Packed packed = random_packing(seed).packed;
    on_each_backend([&](Backend backend) {
      packed.padding_rows = PaddingRows::empty;
      const Windows empty = windows_of(packed, backend);
      packed.padding_rows = PaddingRows::see_document;
      const Windows see = windows_of(packed, backend);
      for (std::size_t i = 0; i + 1 < packed.padded.size(); ++i) {
        const std::int32_t real = packed.cu_seqlens[i + 1] - packed.cu_seqlens[i];
        for (std::int32_t t = packed.padded[i]; t < packed.padded[i + 1]; ++t) {
          ASSERT_EQ(see.begin[t], empty.begin[t]);
          if (t - packed.padded[i] < real) {
            ASSERT_EQ(see.end[t], empty.end[t]);
          } else {
            ASSERT_EQ(empty.end[t], empty.begin[t]);
          }
        }
      }
    });
  }
}

TEST(KeyWindows, OfAnyRowsAreThoseOfAllRows) {
  const Packed all = {.cu_seqlens = {0, 4, 4, 11}, .tokens = 13};
  Packed some = all;
  some.query_rows = {12, 3, 10, 0, 5, 5, 11};
  on_each_backend([&](Backend backend) {
    const Windows of_all = windows_of(all, backend);
    const Windows of_some = windows_of(some, backend);
    for (std::size_t t = 0; t < some.query_rows.size(); ++t) {
      EXPECT_EQ(of_some.begin[t], of_all.begin[some.query_rows[t]]);
      EXPECT_EQ(of_some.end[t], of_all.end[some.query_rows[t]]);
    }
  });
}

}  // namespace
}  // namespace winnow::tests
