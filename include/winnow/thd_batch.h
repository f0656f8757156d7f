// SPDX-License-Identifier: Apache-2.0
// THD batches: rows of packed documents, each with padding, as one row of tokens with offsets.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace winnow {

/// The documents of a batch of `rows` rows with `row_tokens` slots each. Every row holds documents
/// one after another: document j takes seq_lens_padded[row][j] slots, of which the first
/// seq_lens[row][j] are real. The padded lengths of a row sum to row_tokens; behind its last
/// document both have the fill.
struct PaddedDocuments {
  std::int64_t rows = 0;
  std::int64_t row_tokens = 0;
  std::span<const std::int64_t> seq_lens{};         // [rows, most documents of a row]
  std::span<const std::int64_t> seq_lens_padded{};  // [rows, most documents of a row]
  std::int64_t fill = -1000;
};

/// Where the documents of a THD batch stand. With several chunks every one of them is a batch of
/// its own, and their offsets are filled up to one width.
struct ThdLayout {
  std::int64_t chunks = 1;
  std::int64_t tokens = 0;                        // of a chunk
  std::int64_t offsets = 0;                       // of a chunk: its most documents, plus 1
  std::vector<std::int32_t> cu_seqlens{};         // [chunks, offsets]
  std::vector<std::int32_t> cu_seqlens_padded{};  // [chunks, offsets]; empty if the same
  std::vector<std::int32_t> max_seqlen{};         // [chunks]
  std::vector<std::uint8_t> padding_mask{};       // [chunks, tokens], 1: no document's token
};

/// Where only the last document of a chunk has padding, that joins it: its length is then that with
/// padding, and there are no padded offsets. The padding mask knows nothing of that, and comes from
/// the lengths alone, never from tokens.
ThdLayout thd_layout(const PaddedDocuments& documents, std::int64_t chunks = 1);

/// A padded batch: [rows, row_tokens] each.
struct PaddedBatch {
  PaddedDocuments documents{};
  std::span<const std::int64_t> input_ids{};
  std::span<const std::int64_t> labels{};
  std::span<const std::int64_t> position_ids{};
};

/// [chunks, tokens] each.
struct ThdBatch {
  ThdLayout layout{};
  std::vector<std::int64_t> input_ids{};
  std::vector<std::int64_t> labels{};
  std::vector<std::int64_t> position_ids{};
};

/// A chunk holds rows / chunks rows of the batch.
ThdBatch thd_batch(const PaddedBatch& batch, std::int64_t chunks = 1);

/// What a rank holds of a chunk: [its rows] each. The layout stays that of the whole chunk.
struct ThdShard {
  std::vector<std::int32_t> query_rows{};  // what KeyWindows::query_rows takes
  std::vector<std::int64_t> input_ids{};
  std::vector<std::int64_t> labels{};
  std::vector<std::int64_t> position_ids{};
  std::vector<std::uint8_t> padding_mask{};
};

/// `rows`: of the chunk, as shard_rows gives them.
ThdShard thd_shard(const ThdBatch& batch, std::int64_t chunk, std::span<const std::int32_t> rows);

}  // namespace winnow
