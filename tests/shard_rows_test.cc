// SPDX-License-Identifier: Apache-2.0
// shard_rows: golden values and properties: each row once, chunks of equal size, equal work.
#include <algorithm>
#include <numeric>

#include "tests/testing.h"

namespace winnow::tests {
namespace {

using Rows = std::vector<Ints>;

constexpr Sharding kShardings[] = {Sharding::contiguous, Sharding::zigzag};

Ints offsets_of(const Ints& lengths) {
  Ints offsets{0};
  for (const std::int32_t length : lengths) offsets.push_back(offsets.back() + length);
  return offsets;
}

Ints random_lengths(std::uint64_t seed, std::int64_t count, std::int64_t most) {
  const Random random(seed, "lengths");
  Ints lengths;
  for (std::int64_t i = 0; i < count; ++i)
    lengths.push_back(static_cast<std::int32_t>(random.below(i, most + 1)));
  return lengths;
}

/// The causal work of a rank: the number of keys that its queries see.
std::vector<double> work_of(const Shards& shards, const Ints& offsets) {
  std::vector<double> work;
  for (const Ints& rows : shards.rows) {
    double keys = 0;
    for (const std::int32_t row : rows) {
      const auto next = std::upper_bound(offsets.begin(), offsets.end(), row);
      keys += row - *(next - 1) + 1;
    }
    work.push_back(keys);
  }
  return work;
}

/// The ratio of the largest work to the average.
double imbalance(const std::vector<double>& shares) {
  return *std::max_element(shares.begin(), shares.end()) * static_cast<double>(shares.size()) /
         std::accumulate(shares.begin(), shares.end(), 0.0);
}

/// The lengths of the runs of consecutive rows of [begin, end) that a rank holds.
Ints runs(const Ints& rows, std::int32_t begin, std::int32_t end) {
  Ints lengths;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (rows[i] < begin || rows[i] >= end) continue;
    const bool continues = i > 0 && rows[i - 1] == rows[i] - 1 && rows[i] > begin;
    if (continues) {
      ++lengths.back();
    } else {
      lengths.push_back(1);
    }
  }
  return lengths;
}

TEST(ShardRows, ContiguousCutsTheBatchByIntegerDivision) {
  const Rows expected = {{0, 1}, {2, 3, 4}, {5, 6}, {7, 8, 9}};
  EXPECT_EQ(shard_rows(Ints{0, 3, 10}, 10, 4, Sharding::contiguous).rows, expected);
}

TEST(ShardRows, ZigzagGivesEveryRankAnEarlyAndALateChunk) {
  const Rows expected = {{0, 1, 6, 7}, {2, 3, 4, 5}};
  EXPECT_EQ(shard_rows(Ints{0, 8}, 8, 2, Sharding::zigzag).rows, expected);
}

TEST(ShardRows, ZigzagCutsEveryDocument) {
  const Rows expected = {{0, 3, 4, 5, 10, 11}, {1, 2, 6, 7, 8, 9}};
  EXPECT_EQ(shard_rows(Ints{0, 4, 12}, 12, 2, Sharding::zigzag).rows, expected);
}

TEST(ShardRows, RowsPastTheLastDocumentAreOneMore) {
  EXPECT_EQ(shard_rows(Ints{0, 4}, 12, 2, Sharding::zigzag).rows,
            shard_rows(Ints{0, 4, 12}, 12, 2, Sharding::zigzag).rows);
  EXPECT_EQ(shard_rows(Ints{0}, 12, 3, Sharding::zigzag).rows,
            shard_rows(Ints{0, 12}, 12, 3, Sharding::zigzag).rows);
}

TEST(ShardRows, ChunksBeginAtMultiplesOfTheirDocument) {
  const Rows contiguous = {{0, 1, 2, 3, 4, 5, 6}, {7, 8, 9, 10, 11, 12}};
  EXPECT_EQ(shard_rows(Ints{0, 3, 13}, 13, 2, Sharding::contiguous, 4).rows, contiguous);
  const Rows zigzag = {{0, 1, 6, 7, 8}, {2, 3, 4, 5}};
  EXPECT_EQ(shard_rows(Ints{0, 9}, 9, 2, Sharding::zigzag, 2).rows, zigzag);
}

TEST(ShardRows, OneRankHoldsAll) {
  Ints all(13);
  std::iota(all.begin(), all.end(), 0);
  for (const Sharding sharding : kShardings) {
    EXPECT_EQ(shard_rows(Ints{0, 5, 11}, 13, 1, sharding).rows, Rows{all});
    EXPECT_EQ(shard_rows(Ints{0, 5, 11}, 13, 1, sharding, 4).rows, Rows{all});
  }
}

TEST(ShardRows, EmptyBatchesAndMoreRanksThanRows) {
  for (const Sharding sharding : kShardings) {
    EXPECT_EQ(shard_rows(Ints{0, 0, 0}, 0, 3, sharding).rows, Rows(3));
    Ints all;
    for (const Ints& rows : shard_rows(Ints{0, 2}, 2, 5, sharding).rows)
      all.insert(all.end(), rows.begin(), rows.end());
    std::sort(all.begin(), all.end());
    EXPECT_EQ(all, (Ints{0, 1}));
  }
}

TEST(ShardRows, EveryRowIsHeldOnceAndRowsAscend) {
  for (std::uint64_t seed = 0; seed < 40; ++seed) {
    const Ints offsets = offsets_of(random_lengths(seed, 1 + seed % 7, 60));
    const std::int64_t tokens = offsets.back() + static_cast<std::int64_t>(seed % 5);
    for (const Sharding sharding : kShardings) {
      for (const int ranks : {1, 2, 3, 8}) {
        for (const int multiple : {1, 4, 7}) {
          std::vector<int> holders(static_cast<std::size_t>(tokens), 0);
          for (const Ints& rows : shard_rows(offsets, tokens, ranks, sharding, multiple).rows) {
            EXPECT_TRUE(std::is_sorted(rows.begin(), rows.end()));
            for (const std::int32_t row : rows) ++holders.at(static_cast<std::size_t>(row));
          }
          EXPECT_EQ(std::count(holders.begin(), holders.end(), 1), tokens);
        }
      }
    }
  }
}

TEST(ShardRows, ContiguousBordersAreTheNearestAllowed) {
  for (std::uint64_t seed = 0; seed < 40; ++seed) {
    const Ints offsets = offsets_of(random_lengths(seed, 1 + seed % 9, 100));
    for (const int multiple : {1, 4, 7}) {
      const Shards shards = shard_rows(offsets, offsets.back(), 4, Sharding::contiguous, multiple);
      std::int64_t begin = 0;
      for (std::int64_t rank = 0; rank < 4; ++rank) {
        const std::int64_t end = begin + static_cast<std::int64_t>(shards.rows[rank].size());
        EXPECT_LE(std::abs(end - (rank + 1) * offsets.back() / 4), multiple / 2);
        // A boundary within a document is at a multiple of `multiple` rows.
        const auto next = std::upper_bound(offsets.begin(), offsets.end(), end);
        if (next != offsets.end()) {
          EXPECT_EQ((end - *(next - 1)) % multiple, 0);
        }
        begin = end;
      }
    }
  }
}

TEST(ShardRows, ZigzagChunksAreEven) {
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    const Ints offsets = offsets_of(random_lengths(seed, 1 + seed % 5, 200));
    for (const int ranks : {2, 3, 5}) {
      for (const int multiple : {1, 2, 8}) {
        const Shards shards =
            shard_rows(offsets, offsets.back(), ranks, Sharding::zigzag, multiple);
        for (std::size_t i = 1; i < offsets.size(); ++i) {
          const std::int32_t length = offsets[i] - offsets[i - 1];
          if (length < 4 * ranks * multiple) continue;  // so that no chunk is empty
          Ints sizes;
          for (int rank = 0; rank < ranks - 1; ++rank) {
            const Ints chunks = runs(shards.rows[rank], offsets[i - 1], offsets[i]);
            ASSERT_EQ(chunks.size(), 2U);
            EXPECT_EQ(chunks[0] % multiple, 0);
            sizes.insert(sizes.end(), chunks.begin(), chunks.end());
          }
          const auto [least, most] = std::minmax_element(sizes.begin(), sizes.end());
          EXPECT_LE(*most - *least, multiple) << "document of " << length << ", ranks " << ranks;
          // The two chunks of the last rank are adjacent.
          const Ints both = runs(shards.rows[ranks - 1], offsets[i - 1], offsets[i]);
          ASSERT_EQ(both.size(), 1U);
          EXPECT_GE(both[0], 2 * (*most - multiple));
          EXPECT_LE(both[0], 2 * (*least + multiple));
        }
      }
    }
  }
}

TEST(ShardRows, ZigzagMakesCausalWorkEqual) {
  for (const int ranks : {2, 4, 8}) {
    const Ints offsets = {0, 16384};
    const Shards zigzag = shard_rows(offsets, 16384, ranks, Sharding::zigzag);
    const Shards contiguous = shard_rows(offsets, 16384, ranks, Sharding::contiguous);
    EXPECT_LT(imbalance(work_of(zigzag, offsets)), 1.001);
    // The last of n ranks has (2n - 1) / n^2 of the work.
    EXPECT_NEAR(imbalance(work_of(contiguous, offsets)), (2.0 * ranks - 1) / ranks, 1e-3);
  }
}

TEST(ShardRows, ShortDocumentsDoNotFallToOneRank) {
  for (const std::int32_t length : {1, 2, 3, 7, 9, 17}) {
    const Ints offsets = offsets_of(Ints(1000, length));
    const Shards shards = shard_rows(offsets, offsets.back(), 4, Sharding::zigzag);
    std::vector<double> rows;
    for (const Ints& shard : shards.rows) rows.push_back(static_cast<double>(shard.size()));
    EXPECT_LT(imbalance(rows), 1.01) << length;
    EXPECT_LT(imbalance(work_of(shards, offsets)), 1.01) << length;
  }
}

TEST(ShardRows, RefusalsNameTheArgument) {
  const auto refusal = [](const Ints& cu_seqlens, std::int64_t tokens, int ranks,
                          Sharding sharding = Sharding::zigzag, int multiple = 1) {
    return refusal_of([&] { shard_rows(cu_seqlens, tokens, ranks, sharding, multiple); });
  };
  EXPECT_EQ(refusal({}, 4, 2), "shard_rows: cu_seqlens []: documents + 1 must be at least 1");
  EXPECT_EQ(refusal({1, 4}, 4, 2), "shard_rows: cu_seqlens[0] 1: must be 0");
  EXPECT_EQ(refusal({0, -3}, 4, 2),
            "shard_rows: cu_seqlens[1] -3: must be at least 0, as cu_seqlens[0]");
  EXPECT_EQ(refusal({0, 3, 2}, 4, 2),
            "shard_rows: cu_seqlens[2] 2: must be at least 3, as cu_seqlens[1]");
  EXPECT_EQ(refusal({0, 3, 5}, 4, 2), "shard_rows: cu_seqlens[2] 5: must be at most 4, as tokens");
  EXPECT_EQ(refusal({0}, -1, 2), "shard_rows: tokens -1: must be at least 0");
  EXPECT_EQ(refusal({0}, std::int64_t{1} << 31, 2),
            "shard_rows: tokens 2147483648: must be at most 2147483647");
  EXPECT_EQ(refusal({0}, 4, 0), "shard_rows: ranks 0: must be at least 1");
  EXPECT_EQ(refusal({0}, 4, kMaxInt32), "shard_rows: ranks 2147483647: must be at most 1048576");
  EXPECT_EQ(refusal({0}, 4, 2, static_cast<Sharding>(2)),
            "shard_rows: sharding 2: must be at most 1");
  EXPECT_EQ(refusal({0}, 4, 2, Sharding::zigzag, 0), "shard_rows: multiple 0: must be at least 1");
}

}  // namespace
}  // namespace winnow::tests
