// SPDX-License-Identifier: Apache-2.0
// Random calls by seed of the functions that split and pack batches on the host, most of them
// spoilt. Each has the properties of its kind or is refused.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <numeric>
#include <string>

#include "tests/padded_documents.h"

namespace winnow::tests {

class BatchFuzz {
 public:
  std::uint64_t computed = 0;
  std::uint64_t refused = 0;

  void call(std::uint64_t seed) {
    SCOPED_TRACE(fmt::format("seed {}: batch", seed));
    Draws draws(seed);
    try {
      if (draws.below(2) == 0) {
        expect_rows_split(draws);
      } else {
        expect_documents_packed(draws);
      }
      ++computed;
    } catch (const Error& error) {
      ++refused;
      EXPECT_EQ(error.code(), ErrorCode::invalid_argument) << error.what();
      EXPECT_TRUE(draws.is_spoilt()) << error.what();
    }
  }

 private:
  /// Numbers of a seed; of every valid one of an argument, a spoilt call may get another.
  class Draws {
   public:
    explicit Draws(std::uint64_t seed) : random_(seed, "batch"), spoils_(seed % 4 != 0) {}

    std::int64_t below(std::int64_t n) { return random_.below(draw_++, n); }
    bool is_spoilt() const { return is_spoilt_; }

    /// `valid`, or sometimes a number that seldom is, of [least, most].
    std::int64_t number(std::int64_t valid, std::int64_t least, std::int64_t most) {
      return spoils_ && below(6) == 0 ? hostile(valid, least, most) : valid;
    }
    /// Sometimes makes one of the values another, or the list longer or shorter.
    template <class T>
    void spoil(std::vector<T>& values, std::int64_t least, std::int64_t most) {
      if (!spoils_ || values.empty() || below(4) != 0) return;
      const auto count = static_cast<std::int64_t>(values.size());
      if (below(4) == 0) {
        is_spoilt_ = true;
        return values.resize(static_cast<std::size_t>(below(count + 3)));
      }
      T& value = values[static_cast<std::size_t>(below(count))];
      value = static_cast<T>(hostile(value, least, most));
    }

   private:
    std::int64_t hostile(std::int64_t valid, std::int64_t least, std::int64_t most) {
      is_spoilt_ = true;
      const std::int64_t choices[] = {0,     -1,        1,         valid - 1, valid + 1,
                                      kFill, kMinInt32, kMaxInt32, least,     most};
      return std::clamp(choices[below(std::size(choices))], least, most);
    }

    Random random_;
    std::int64_t draw_ = 0;
    bool spoils_;
    bool is_spoilt_ = false;
  };

  static constexpr std::int64_t kLeast = std::numeric_limits<std::int64_t>::min();
  static constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();

  static void expect_rows_split(Draws& draws) {
    Ints offsets = {0};
    for (std::int64_t left = draws.below(6); left > 0; --left)
      offsets.push_back(offsets.back() + static_cast<std::int32_t>(draws.below(12)));
    std::int64_t tokens = draws.number(offsets.back() + draws.below(4), kLeast, kMost);
    if (tokens == kMaxInt32) ++tokens;  // a list of so many rows would be legal, and 8 GiB
    const auto ranks = static_cast<int>(draws.number(1 + draws.below(5), kMinInt32, 1 << 21));
    const auto sharding = static_cast<Sharding>(draws.number(draws.below(2), kMinInt32, 2));
    const auto multiple = static_cast<int>(draws.number(1 + draws.below(4), kMinInt32, kMaxInt32));
    draws.spoil(offsets, kMinInt32, kMaxInt32);
    const Shards shards = shard_rows(offsets, tokens, ranks, sharding, multiple);
    EXPECT_EQ(static_cast<std::int64_t>(shards.rows.size()), ranks);
    Ints all;
    for (const Ints& rows : shards.rows) {
      EXPECT_TRUE(std::is_sorted(rows.begin(), rows.end()));
      all.insert(all.end(), rows.begin(), rows.end());
    }
    std::sort(all.begin(), all.end());
    Ints expected(static_cast<std::size_t>(tokens));
    std::iota(expected.begin(), expected.end(), 0);
    EXPECT_EQ(all, expected);
  }

  static void expect_documents_packed(Draws& draws) {
    Documents documents = random_documents(static_cast<std::uint64_t>(draws.below(1 << 30)));
    const std::int64_t tokens = documents.rows * documents.row_tokens;
    const std::int64_t chunks =
        draws.number(draws.below(2) == 0 ? documents.rows : 1, kLeast, kMost);
    documents.rows = draws.number(documents.rows, kLeast, kMost);
    documents.row_tokens = draws.number(documents.row_tokens, kLeast, kMost);
    if (documents.row_tokens == kMaxInt32) ++documents.row_tokens;  // likewise
    documents.fill = draws.number(documents.fill, kLeast, kMost);
    draws.spoil(documents.seq_lens, kLeast, kMost);
    draws.spoil(documents.seq_lens_padded, kLeast, kMost);
    Longs ids = counted(tokens, 0), labels = counted(tokens, 1), positions = counted(tokens, 2);
    draws.spoil(ids, kLeast, kMost);
    draws.spoil(positions, kLeast, kMost);
    const ThdBatch batch = thd_batch({.documents = documents.view(),
                                      .input_ids = ids,
                                      .labels = labels,
                                      .position_ids = positions},
                                     chunks);
    EXPECT_EQ(batch.input_ids, ids);
    EXPECT_EQ(batch.labels, labels);
    EXPECT_EQ(batch.position_ids, positions);
    std::int64_t padding = documents.rows * documents.row_tokens;
    for (const std::int64_t length : documents.seq_lens)
      padding -= length == documents.fill ? 0 : length;
    const auto& mask = batch.layout.padding_mask;
    EXPECT_EQ(std::accumulate(mask.begin(), mask.end(), std::int64_t{0}), padding);

    const std::int64_t chunk = draws.number(draws.below(chunks), kLeast, kMost);
    Ints rows;
    for (std::int64_t left = draws.below(5); left > 0 && batch.layout.tokens > 0; --left)
      rows.push_back(static_cast<std::int32_t>(draws.below(batch.layout.tokens)));
    draws.spoil(rows, kMinInt32, kMaxInt32);
    const ThdShard shard = thd_shard(batch, chunk, rows);
    EXPECT_EQ(shard.query_rows, rows);
    for (std::size_t i = 0; i < rows.size(); ++i)
      EXPECT_EQ(shard.input_ids[i], ids[chunk * batch.layout.tokens + rows[i]]);
  }
};

}  // namespace winnow::tests
