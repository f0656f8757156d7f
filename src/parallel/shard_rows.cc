// SPDX-License-Identifier: Apache-2.0
// shard_rows: the rows of a batch that each rank holds.
#include <algorithm>
#include <limits>

#include "core/check.h"
#include "core/memory_errors.h"
#include "winnow/parallel.h"

namespace winnow {
namespace {

constexpr std::int64_t kMaxRanks = 1 << 20;  // more than any job has; the lists still fit in memory

/// Rows [begin, end) of a document.
struct Document {
  std::int64_t begin;
  std::int64_t end;
};

void check_arguments(std::span<const std::int32_t> cu_seqlens, std::int64_t tokens, int ranks,
                     Sharding sharding, int multiple) {
  const Check check("shard_rows");
  constexpr std::int32_t kMaxTokens = std::numeric_limits<std::int32_t>::max();
  const auto refuse = [&](std::size_t i, const char* sentence, const auto&... values) {
    check.fail(fmt::format("cu_seqlens[{}]", i), fmt::to_string(cu_seqlens[i]), sentence,
               values...);
  };
  check.in_range("tokens", tokens, 0, kMaxTokens);
  check.in_range("ranks", ranks, 1, kMaxRanks);
  check.in_range("sharding", static_cast<std::int32_t>(sharding), 0,
                 static_cast<std::int32_t>(Sharding::zigzag));
  check.in_range("multiple", multiple, 1, kMaxTokens);
  if (cu_seqlens.empty()) check.fail("cu_seqlens", "[]", refusal::dim_at_least, "documents + 1", 1);
  if (cu_seqlens[0] != 0) refuse(0, refusal::must_start_at_zero);
  for (std::size_t i = 1; i < cu_seqlens.size(); ++i) {
    if (cu_seqlens[i] < cu_seqlens[i - 1]) {
      refuse(i, refusal::at_least_as, cu_seqlens[i - 1], fmt::format("cu_seqlens[{}]", i - 1));
    }
  }
  if (cu_seqlens.back() > tokens) {
    refuse(cu_seqlens.size() - 1, refusal::at_most_as, tokens, "tokens");
  }
}

/// The documents that are not empty. Rows after the last document count as one more.
std::vector<Document> documents_of(std::span<const std::int32_t> cu_seqlens, std::int64_t tokens) {
  std::vector<Document> documents;
  for (std::size_t i = 1; i < cu_seqlens.size(); ++i) {
    if (cu_seqlens[i] > cu_seqlens[i - 1]) documents.push_back({cu_seqlens[i - 1], cu_seqlens[i]});
  }
  if (cu_seqlens.back() < tokens) documents.push_back({cu_seqlens.back(), tokens});
  return documents;
}

void append_rows(std::vector<std::int32_t>& rows, std::int64_t begin, std::int64_t end) {
  for (std::int64_t row = begin; row < end; ++row) rows.push_back(static_cast<std::int32_t>(row));
}

/// Cuts at r*T/n, or at the nearest row at which a chunk may begin.
void shard_contiguous(const std::vector<Document>& documents, std::int64_t tokens,
                      std::int64_t multiple, Shards& shards) {
  const auto ranks = static_cast<std::int64_t>(shards.rows.size());
  auto document = documents.begin();
  std::int64_t begin = 0;
  for (std::int64_t rank = 0; rank < ranks; ++rank) {
    std::int64_t end = (rank + 1) * tokens / ranks;
    while (document != documents.end() && document->end <= end) ++document;
    if (document != documents.end()) {
      const std::int64_t nearest = (end - document->begin + multiple / 2) / multiple * multiple;
      end = std::min(document->begin + nearest, document->end);
    }
    append_rows(shards.rows[rank], begin, end);
    begin = end;
  }
}

/// Spreads the units (of `multiple` rows) of a document over its chunks as evenly as possible:
/// chunk i begins at unit floor((i * units + phase) / chunks). The phase carries over from document
/// to document, so that the remainder does not always go to the same rank.
void shard_zigzag(const std::vector<Document>& documents, std::int64_t multiple, Shards& shards) {
  const auto chunks = 2 * static_cast<std::int64_t>(shards.rows.size());
  std::int64_t running_phase = 0;
  for (const Document& document : documents) {
    const std::int64_t length = document.end - document.begin;
    const std::int64_t units = (length + multiple - 1) / multiple;
    std::int64_t phase = running_phase;
    // A shorter last unit must be in a chunk with one unit more than others, or the sizes of chunks
    // would differ by more than `multiple`.
    if (length % multiple != 0 && units > chunks) phase = std::min(phase, (units - 1) % chunks);
    for (std::int64_t unit = 0; unit < units; ++unit) {
      const std::int64_t chunk = (chunks * (unit + 1) - phase - 1) / units;
      const std::int64_t begin = document.begin + unit * multiple;
      append_rows(shards.rows[std::min(chunk, chunks - 1 - chunk)], begin,
                  std::min(begin + multiple, document.end));
    }
    running_phase = (running_phase + units) % chunks;
  }
}

}  // namespace

Shards shard_rows(std::span<const std::int32_t> cu_seqlens, std::int64_t tokens, int ranks,
                  Sharding sharding, int multiple) {
  return with_memory_errors("shard_rows", [&] {
    check_arguments(cu_seqlens, tokens, ranks, sharding, multiple);
    const std::vector<Document> documents = documents_of(cu_seqlens, tokens);
    Shards shards{std::vector<std::vector<std::int32_t>>(static_cast<std::size_t>(ranks))};
    for (auto& rows : shards.rows) rows.reserve(static_cast<std::size_t>(tokens / ranks + 1));
    if (sharding == Sharding::contiguous) {
      shard_contiguous(documents, tokens, multiple, shards);
    } else {
      shard_zigzag(documents, multiple, shards);
    }
    return shards;
  });
}

}  // namespace winnow
