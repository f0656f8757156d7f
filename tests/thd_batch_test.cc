// SPDX-License-Identifier: Apache-2.0
// THD batches: golden values, properties of every batch, and batches that are refused.
#include <algorithm>
#include <numeric>

#include "tests/padded_documents.h"

namespace winnow::tests {
namespace {

using Bits = std::vector<std::uint8_t>;

/// The documents of the rows [first, first + count).
Documents rows_of(const Documents& documents, std::int64_t first, std::int64_t count) {
  const std::int64_t width = static_cast<std::int64_t>(documents.seq_lens.size()) / documents.rows;
  return {count, documents.row_tokens, part(documents.seq_lens, first * width, count * width),
          part(documents.seq_lens_padded, first * width, count * width)};
}

/// The offsets of a chunk without the fill values.
Ints chunk_of(const Ints& offsets, const ThdLayout& layout, std::int64_t chunk) {
  Ints own = part(offsets, chunk * layout.offsets, layout.offsets);
  own.erase(std::find(own.begin(), own.end(), kFill), own.end());
  return own;
}

TEST(ThdBatch, PaddingBetweenDocumentsKeepsBothOffsets) {
  const Documents documents{2, 6, {3, 2, 6, kFill}, {4, 2, 6, kFill}};
  const ThdLayout layout = thd_layout(documents.view());
  EXPECT_EQ(layout.tokens, 12);
  EXPECT_EQ(layout.cu_seqlens, (Ints{0, 3, 5, 11}));
  EXPECT_EQ(layout.cu_seqlens_padded, (Ints{0, 4, 6, 12}));
  EXPECT_EQ(layout.max_seqlen, (Ints{6}));
  EXPECT_EQ(layout.padding_mask, (Bits{0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0}));
}

TEST(ThdBatch, PaddingAtTheEndJoinsTheLastDocument) {
  const Documents documents{1, 1024, Longs(5, 112), {112, 112, 112, 112, 576}};
  const ThdLayout layout = thd_layout(documents.view());
  EXPECT_EQ(layout.cu_seqlens, (Ints{0, 112, 224, 336, 448, 1024}));
  EXPECT_EQ(layout.cu_seqlens_padded, Ints{});
  EXPECT_EQ(layout.max_seqlen, (Ints{576}));
  // The mask still marks the padding.
  EXPECT_EQ(std::count(layout.padding_mask.begin(), layout.padding_mask.end(), 1), 1024 - 560);
  EXPECT_EQ(std::find(layout.padding_mask.begin(), layout.padding_mask.end(), 1) -
                layout.padding_mask.begin(),
            560);
}

TEST(ThdBatch, PaddingAtTheEndOfAnEarlierRowDoesNotJoin) {
  const Documents documents{2, 4, {3, 3}, {4, 4}};
  const ThdLayout layout = thd_layout(documents.view());
  EXPECT_EQ(layout.cu_seqlens, (Ints{0, 3, 6}));
  EXPECT_EQ(layout.cu_seqlens_padded, (Ints{0, 4, 8}));
  EXPECT_EQ(layout.padding_mask, (Bits{0, 0, 0, 1, 0, 0, 0, 1}));
}

TEST(ThdBatch, WithoutPaddingThereAreNoPaddedOffsets) {
  const Documents documents{4, 6, {6, 6, 6, 6}, {6, 6, 6, 6}};
  const ThdLayout layout = thd_layout(documents.view(), 2);
  EXPECT_EQ(layout.cu_seqlens, (Ints{0, 6, 12, 0, 6, 12}));
  EXPECT_EQ(layout.cu_seqlens_padded, Ints{});
  EXPECT_EQ(layout.max_seqlen, (Ints{6, 6}));
  EXPECT_EQ(layout.padding_mask, Bits(24, 0));
}

TEST(ThdBatch, ChunksAreFilledUpToOneWidth) {
  // Padding between documents in the first chunk, at the end of the second.
  const Documents documents{2, 6, {3, 2, 4, -7}, {4, 2, 6, -7}, -7};
  const ThdLayout layout = thd_layout(documents.view(), 2);
  EXPECT_EQ(layout.tokens, 6);
  EXPECT_EQ(layout.offsets, 3);
  EXPECT_EQ(layout.cu_seqlens, (Ints{0, 3, 5, 0, 6, -7}));
  EXPECT_EQ(layout.cu_seqlens_padded, (Ints{0, 4, 6, 0, 6, -7}));
  EXPECT_EQ(layout.max_seqlen, (Ints{3, 6}));
}

TEST(ThdBatch, DocumentsWithoutTokensStayDocuments) {
  const Documents documents{1, 4, {0, 2, 0}, {1, 3, 0}};
  const ThdLayout layout = thd_layout(documents.view());
  EXPECT_EQ(layout.cu_seqlens, (Ints{0, 0, 2, 2}));
  EXPECT_EQ(layout.cu_seqlens_padded, (Ints{0, 1, 4, 4}));
  EXPECT_EQ(layout.padding_mask, (Bits{1, 0, 0, 1}));
}

TEST(ThdBatch, EveryChunkIsABatchOfItsOwn) {
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    const Documents documents = random_documents(seed);
    for (std::int64_t chunks = 1; chunks <= documents.rows; ++chunks) {
      if (documents.rows % chunks != 0) continue;
      const std::int64_t rows = documents.rows / chunks;
      const ThdLayout all = thd_layout(documents.view(), chunks);
      for (std::int64_t c = 0; c < chunks; ++c) {
        const ThdLayout one = thd_layout(rows_of(documents, c * rows, rows).view());
        EXPECT_EQ(chunk_of(all.cu_seqlens, all, c), one.cu_seqlens);
        if (!all.cu_seqlens_padded.empty()) {
          EXPECT_EQ(chunk_of(all.cu_seqlens_padded, all, c),
                    one.cu_seqlens_padded.empty() ? one.cu_seqlens : one.cu_seqlens_padded);
        } else {
          EXPECT_EQ(one.cu_seqlens_padded, Ints{});
        }
        EXPECT_EQ(all.max_seqlen[c], one.max_seqlen[0]);
        EXPECT_EQ(part(all.padding_mask, c * all.tokens, all.tokens), one.padding_mask);
      }
    }
  }
}

TEST(ThdBatch, RealTokensKeepTheirDocumentAndPlace) {
  int with_padded_offsets = 0;
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    const Documents documents = random_documents(seed);
    const ThdLayout layout = thd_layout(documents.view());
    with_padded_offsets += layout.cu_seqlens_padded.empty() ? 0 : 1;
    const Ints& real = layout.cu_seqlens;
    const Ints& padded = layout.cu_seqlens_padded.empty() ? real : layout.cu_seqlens_padded;
    ASSERT_EQ(padded.back(), layout.tokens);
    // The tokens of the given lengths, in the resulting offsets.
    std::size_t document = 0;
    std::int64_t begin = 0;
    for (std::size_t i = 0; i < documents.seq_lens.size(); ++i) {
      if (documents.seq_lens[i] == kFill) continue;
      EXPECT_EQ(padded[document], begin);
      EXPECT_GE(real[document + 1] - real[document], documents.seq_lens[i]);
      for (std::int64_t slot = 0; slot < documents.seq_lens_padded[i]; ++slot)
        EXPECT_EQ(layout.padding_mask[begin + slot], slot >= documents.seq_lens[i] ? 1 : 0);
      begin += documents.seq_lens_padded[i];
      ++document;
    }
    EXPECT_EQ(document + 1, real.size());
  }
  EXPECT_GT(with_padded_offsets, 20);
  EXPECT_LT(with_padded_offsets, 180);
}

TEST(ThdBatch, ShardsHoldTheRowsOfTheWhole) {
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    const Documents documents = random_documents(seed);
    const std::int64_t slots = documents.rows * documents.row_tokens;
    const Longs ids = counted(slots, 100), labels = counted(slots, 5000),
                positions = counted(slots, 0);
    const std::int64_t chunks = documents.rows % 2 == 0 ? 2 : 1;
    const ThdBatch batch = thd_batch({.documents = documents.view(),
                                      .input_ids = ids,
                                      .labels = labels,
                                      .position_ids = positions},
                                     chunks);
    EXPECT_EQ(batch.input_ids, ids);
    EXPECT_EQ(batch.labels, labels);
    EXPECT_EQ(batch.position_ids, positions);
    const ThdLayout& layout = batch.layout;
    for (std::int64_t c = 0; c < chunks; ++c) {
      const Ints& offsets =
          layout.cu_seqlens_padded.empty() ? layout.cu_seqlens : layout.cu_seqlens_padded;
      const Shards shards =
          shard_rows(chunk_of(offsets, layout, c), layout.tokens, 3, Sharding::zigzag);
      for (const Ints& rows : shards.rows) {
        const ThdShard shard = thd_shard(batch, c, rows);
        EXPECT_EQ(shard.query_rows, rows);
        ASSERT_EQ(shard.padding_mask.size(), rows.size());
        for (std::size_t i = 0; i < rows.size(); ++i) {
          const std::int64_t slot = c * layout.tokens + rows[i];
          EXPECT_EQ(shard.input_ids[i], 100 + slot);
          EXPECT_EQ(shard.labels[i], 5000 + slot);
          EXPECT_EQ(shard.position_ids[i], slot);
          EXPECT_EQ(shard.padding_mask[i], layout.padding_mask[slot]);
        }
      }
    }
  }
}

TEST(ThdBatch, BadLengthsAreRefusedWithRowAndNumbers) {
  const auto refusal = [](const Documents& documents, std::int64_t chunks = 1) {
    return refusal_of([&] { thd_layout(documents.view(), chunks); });
  };
  EXPECT_EQ(refusal({2, 6, {3, 2, 5, kFill}, {4, 2, 5, kFill}}),
            "thd_batch: sum of seq_lens_padded[1] 5: must be 6, as the tokens of a row");
  EXPECT_EQ(refusal({2, 6, {3, 2, 6, kFill}, {4, 3, 6, kFill}}),
            "thd_batch: sum of seq_lens_padded[0] 7: must be 6, as the tokens of a row");
  EXPECT_EQ(refusal({2, 6, {3, 2, 7, kFill}, {4, 2, 6, kFill}}),
            "thd_batch: seq_lens_padded[1][0] 6: must be at least 7, as seq_lens[1][0]");
  EXPECT_EQ(refusal({2, 6, {3, -2, 6, kFill}, {4, 2, 6, kFill}}),
            "thd_batch: seq_lens[0][1] -2: must be at least 0, or -1000 behind the last length");
  EXPECT_EQ(refusal({2, 6, {3, 2, 6, kFill}, {4, -2, 6, kFill}}),
            "thd_batch: seq_lens_padded[0][1] -2: must be at least 2, as seq_lens[0][1]");
  EXPECT_EQ(refusal({1, 6, {3, kFill, 2}, {4, kFill, 2}}),
            "thd_batch: seq_lens[0][2] 2: must be -1000, as seq_lens[0][1]");
  EXPECT_EQ(refusal({1, 6, {3, kFill}, {4, 2}}),
            "thd_batch: seq_lens_padded[0][1] 2: must be -1000, as seq_lens[0][1]");
  EXPECT_EQ(refusal({1, 6, {3, 2}, {6, kFill}}),
            "thd_batch: seq_lens_padded[0][1] -1000: must be at least 2, as seq_lens[0][1]");
  EXPECT_EQ(refusal({1, 6, {kFill}, {kFill}}),
            "thd_batch: sum of seq_lens_padded[0] 0: must be 6, as the tokens of a row");
  constexpr std::int64_t kHuge = std::numeric_limits<std::int64_t>::max();
  EXPECT_EQ(refusal({1, 6, {kHuge, kHuge}, {kHuge, kHuge}}),
            "thd_batch: sum of seq_lens_padded[0] 4294967296: must be 6, as the tokens of a row");
}

TEST(ThdBatch, BadShapesAreRefused) {
  const auto refusal = [](const Documents& documents, std::int64_t chunks = 1) {
    return refusal_of([&] { thd_layout(documents.view(), chunks); });
  };
  EXPECT_EQ(refusal({3, 2, {2, 2, 2}, {2, 2, 2}}, 2),
            "thd_batch: rows 3: must be a multiple of 2, as chunks");
  EXPECT_EQ(refusal({3, 2, {2, 2, 2}, {2, 2, 2}}, 0), "thd_batch: chunks 0: must be at least 1");
  EXPECT_EQ(refusal({3, 2, {2, 2, 2}, {2, 2, 2}}, 4), "thd_batch: chunks 4: must be at most 3");
  EXPECT_EQ(refusal({0, 2, {}, {}}), "thd_batch: rows 0: must be at least 1");
  EXPECT_EQ(refusal({2, -1, {2, 2}, {2, 2}}), "thd_batch: row_tokens -1: must be at least 0");
  EXPECT_EQ(refusal({2, 2, {2}, {2}}), "thd_batch: seq_lens [1]: elements must be at least 2");
  EXPECT_EQ(refusal({2, 2, {2, 2, 2}, {2, 2, 2}}),
            "thd_batch: seq_lens [3]: elements must be a multiple of 2");
  EXPECT_EQ(refusal({2, 2, {2, 2}, {2, 2, 2}}),
            "thd_batch: seq_lens_padded [3]: elements must be 2, as in seq_lens");
  EXPECT_EQ(refusal({1, 2, {2}, {2}, 0}), "thd_batch: fill 0: must be at most -1");
  EXPECT_EQ(refusal({2, std::int64_t{1} << 30, {1, 1}, {1, 1}}),
            "thd_batch: row_tokens 1073741824: must be at most 1073741823, as a chunk has 2 rows");

  const Documents documents{1, 3, {3}, {3}};
  const Longs three(3), four(4);
  EXPECT_EQ(refusal_of([&] {
              thd_batch({.documents = documents.view(),
                         .input_ids = three,
                         .labels = four,
                         .position_ids = three});
            }),
            "thd_batch: labels [4]: elements must be 3, as in rows * row_tokens");
  const ThdBatch batch = thd_batch(
      {.documents = documents.view(), .input_ids = three, .labels = three, .position_ids = three});
  EXPECT_EQ(refusal_of([&] { thd_shard(batch, 1, Ints{0}); }),
            "thd_shard: chunk 1: must be at most 0");
  EXPECT_EQ(refusal_of([&] {
              thd_shard(batch, 0, Ints{0, 3});
            }),
            "thd_shard: rows[1] 3: must be at most 2");
  EXPECT_EQ(refusal_of([&] { thd_shard(batch, 0, Ints{-1}); }),
            "thd_shard: rows[0] -1: must be at least 0");
  ThdBatch without_labels = batch;
  without_labels.labels.clear();
  EXPECT_EQ(refusal_of([&] { thd_shard(without_labels, 0, Ints{0}); }),
            "thd_shard: labels [0]: elements must be 3, as in rows * row_tokens");
}

}  // namespace
}  // namespace winnow::tests
