// SPDX-License-Identifier: Apache-2.0
// THD batches: flattens padded rows of packed documents into one row of tokens with offsets.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace winnow {

/// The documents of a batch of `rows` rows with `row_tokens` tokens each. The documents of a row
/// follow each other: document j takes seq_lens_padded[row][j] tokens, of which the first
/// seq_lens[row][j] are real. The padded lengths of a row sum to row_tokens; after its last
/// document both arrays hold the fill value.
struct PaddedDocuments {
  std::int64_t rows = 0;
  std::int64_t row_tokens = 0;
  std::span<const std::int64_t> seq_lens{};         // [rows, largest number of documents]
  std::span<const std::int64_t> seq_lens_padded{};  // [rows, largest number of documents]
  std::int64_t fill = -1000;
};

/// The offsets of the documents of a THD batch. With several chunks each is a batch of its own, and
/// their offsets are padded to one width with the fill value.
struct ThdLayout {
  std::int64_t chunks = 1;
  std::int64_t tokens = 0;                        // per chunk
  std::int64_t offsets = 0;                       // per chunk: largest number of documents + 1
  std::vector<std::int32_t> cu_seqlens{};         // [chunks, offsets]
  std::vector<std::int32_t> cu_seqlens_padded{};  // [chunks, offsets]; empty if the same
  std::vector<std::int32_t> max_seqlen{};         // [chunks]
  std::vector<std::uint8_t> padding_mask{};       // [chunks, tokens], 1: padding
};

/// If only the last document of a chunk has padding, its padding counts as part of it: its length
/// is the padded one, and there are no padded offsets. The padding mask still marks that padding;
/// it is derived from the lengths, never from tokens.
ThdLayout thd_layout(const PaddedDocuments& documents, std::int64_t chunks = 1);

/// A padded batch; the tensors are [rows, row_tokens].
struct PaddedBatch {
  PaddedDocuments documents{};
  std::span<const std::int64_t> input_ids{};
  std::span<const std::int64_t> labels{};
  std::span<const std::int64_t> position_ids{};
};

/// A packed batch; the tensors are [chunks, tokens].
struct ThdBatch {
  ThdLayout layout{};
  std::vector<std::int64_t> input_ids{};
  std::vector<std::int64_t> labels{};
  std::vector<std::int64_t> position_ids{};
};

/// Flattens a padded batch; a chunk gets rows / chunks rows of it.
ThdBatch thd_batch(const PaddedBatch& batch, std::int64_t chunks = 1);

/// The shard of a chunk that a rank holds; all are [rows of the rank]. The layout remains that of
/// the whole chunk.
struct ThdShard {
  std::vector<std::int32_t> query_rows{};  // for KeyWindows::query_rows
  std::vector<std::int64_t> input_ids{};
  std::vector<std::int64_t> labels{};
  std::vector<std::int64_t> position_ids{};
  std::vector<std::uint8_t> padding_mask{};
};

/// `rows` are the rows of the rank within the chunk, as shard_rows returns them.
ThdShard thd_shard(const ThdBatch& batch, std::int64_t chunk, std::span<const std::int32_t> rows);

}  // namespace winnow
