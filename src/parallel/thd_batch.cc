// SPDX-License-Identifier: Apache-2.0
// thd_layout, thd_batch, thd_shard: padded batches as packed (THD) ones, and their shards.
#include "winnow/thd_batch.h"

#include <algorithm>
#include <limits>

#include "core/check.h"
#include "core/memory_errors.h"

namespace winnow {
namespace {

using Lengths = std::span<const std::int64_t>;
using Offsets = std::vector<std::int32_t>;

constexpr std::int64_t kMaxTokens = std::numeric_limits<std::int32_t>::max();

/// The document lengths of one row, without the fill values at its end.
struct Row {
  Lengths real;
  Lengths padded;
};

void check_arguments(const Check& check, const PaddedDocuments& documents, std::int64_t chunks) {
  check.in_range("rows", documents.rows, 1, kMaxTokens);
  check.in_range("row_tokens", documents.row_tokens, 0, kMaxTokens);
  check.in_range("chunks", chunks, 1, documents.rows);
  check.in_range("fill", documents.fill, std::numeric_limits<std::int32_t>::min(), -1);
  if (documents.rows % chunks != 0)
    check.fail("rows", fmt::to_string(documents.rows), refusal::multiple_of_as, chunks, "chunks");
  if (documents.row_tokens * (documents.rows / chunks) > kMaxTokens) {
    check.fail("row_tokens", fmt::to_string(documents.row_tokens), refusal::at_most_as,
               kMaxTokens / (documents.rows / chunks),
               fmt::format("a chunk has {} rows", documents.rows / chunks));
  }
  const auto elements = static_cast<std::int64_t>(documents.seq_lens.size());
  const std::string given = fmt::format("[{}]", elements);
  if (elements < documents.rows)
    check.fail("seq_lens", given, refusal::dim_at_least, "elements", documents.rows);
  if (elements % documents.rows != 0)
    check.fail("seq_lens", given, refusal::dim_multiple, "elements", documents.rows);
  if (documents.seq_lens_padded.size() != documents.seq_lens.size()) {
    check.fail("seq_lens_padded", fmt::format("[{}]", documents.seq_lens_padded.size()),
               refusal::dim_differs, "elements", elements, "seq_lens");
  }
}

/// Checks the lengths of one row and drops the fill values at its end.
Row checked_row(const Check& check, const PaddedDocuments& documents, std::int64_t row) {
  const std::size_t width = documents.seq_lens.size() / static_cast<std::size_t>(documents.rows);
  const std::size_t first = width * static_cast<std::size_t>(row);
  const Lengths real = documents.seq_lens.subspan(first, width);
  const Lengths padded = documents.seq_lens_padded.subspan(first, width);
  const std::int64_t fill = documents.fill;
  const auto name = [&](const char* argument, std::size_t j) {
    return fmt::format("{}[{}][{}]", argument, row, j);
  };
  const auto refuse_real = [&](std::size_t j, const char* sentence, const auto&... values) {
    check.fail(name("seq_lens", j), fmt::to_string(real[j]), sentence, values...);
  };
  const auto refuse_padded = [&](std::size_t j, const char* sentence, const auto&... values) {
    check.fail(name("seq_lens_padded", j), fmt::to_string(padded[j]), sentence, values...);
  };

  const std::size_t count = std::find(real.begin(), real.end(), fill) - real.begin();
  std::int64_t sum = 0;
  for (std::size_t j = 0; j < count; ++j) {
    if (real[j] < 0) refuse_real(j, refusal::at_least_or_fill, 0, fill);
    if (padded[j] < real[j]) refuse_padded(j, refusal::at_least_as, real[j], name("seq_lens", j));
    sum += std::min(padded[j], kMaxTokens + 1);  // clamped against overflow; refused below
  }
  for (std::size_t j = count; j < width; ++j) {
    if (real[j] != fill) refuse_real(j, refusal::same_as, fill, name("seq_lens", count));
    if (padded[j] != fill) refuse_padded(j, refusal::same_as, fill, name("seq_lens", count));
  }
  if (sum != documents.row_tokens) {
    check.fail(fmt::format("sum of seq_lens_padded[{}]", row), fmt::to_string(sum),
               refusal::same_as, documents.row_tokens, "the tokens of a row");
  }
  return {real.first(count), padded.first(count)};
}

void append_length(Offsets& offsets, std::int64_t length) {
  offsets.push_back(offsets.back() + static_cast<std::int32_t>(length));
}

/// Appends the offsets of a chunk, padded with `fill` to `width` elements.
void append(Offsets& all, const Offsets& offsets, std::int64_t width, std::int64_t fill) {
  const std::size_t end = all.size() + static_cast<std::size_t>(width);
  all.insert(all.end(), offsets.begin(), offsets.end());
  all.resize(end, static_cast<std::int32_t>(fill));
}

std::int32_t longest(const Offsets& offsets) {
  std::int32_t most = 0;
  for (std::size_t i = 1; i < offsets.size(); ++i)
    most = std::max(most, offsets[i] - offsets[i - 1]);
  return most;
}

/// Checks that an argument has one element for every token of all chunks.
void check_token_count(const Check& check, const ThdLayout& layout, const char* argument,
                       std::size_t given) {
  const auto tokens = static_cast<std::size_t>(layout.chunks * layout.tokens);
  if (given != tokens) {
    check.fail(argument, fmt::format("[{}]", given), refusal::dim_differs, "elements", tokens,
               "rows * row_tokens");
  }
}

template <class T>
std::vector<T> gathered(const std::vector<T>& values, std::int64_t first,
                        std::span<const std::int32_t> rows) {
  std::vector<T> result;
  result.reserve(rows.size());
  for (const std::int32_t row : rows) result.push_back(values[first + row]);
  return result;
}

}  // namespace

ThdLayout thd_layout(const PaddedDocuments& documents, std::int64_t chunks) {
  return with_memory_errors("thd_batch", [&] {
    const Check check("thd_batch");
    check_arguments(check, documents, chunks);
    ThdLayout layout;
    layout.chunks = chunks;
    layout.tokens = documents.rows / chunks * documents.row_tokens;

    std::vector<Offsets> real(chunks, {0});
    std::vector<Offsets> padded(chunks, {0});
    for (std::int64_t r = 0; r < documents.rows; ++r) {
      const Row row = checked_row(check, documents, r);
      const std::int64_t chunk = r / (documents.rows / chunks);
      for (std::size_t j = 0; j < row.real.size(); ++j) {
        layout.padding_mask.insert(layout.padding_mask.end(), row.real[j], 0);
        layout.padding_mask.insert(layout.padding_mask.end(), row.padded[j] - row.real[j], 1);
        append_length(real[chunk], row.real[j]);
        append_length(padded[chunk], row.padded[j]);
      }
    }

    for (std::int64_t c = 0; c < chunks; ++c) {
      if (std::equal(real[c].begin(), real[c].end() - 1, padded[c].begin())) real[c] = padded[c];
      layout.offsets = std::max(layout.offsets, static_cast<std::int64_t>(real[c].size()));
      layout.max_seqlen.push_back(longest(real[c]));
    }
    const bool padding_between = real != padded;
    for (std::int64_t c = 0; c < chunks; ++c) {
      append(layout.cu_seqlens, real[c], layout.offsets, documents.fill);
      if (padding_between)
        append(layout.cu_seqlens_padded, padded[c], layout.offsets, documents.fill);
    }
    return layout;
  });
}

ThdBatch thd_batch(const PaddedBatch& batch, std::int64_t chunks) {
  return with_memory_errors("thd_batch", [&] {
    ThdBatch result{thd_layout(batch.documents, chunks)};
    const auto flat = [&](const char* argument, std::span<const std::int64_t> values) {
      check_token_count(Check("thd_batch"), result.layout, argument, values.size());
      return std::vector<std::int64_t>(values.begin(), values.end());
    };
    result.input_ids = flat("input_ids", batch.input_ids);
    result.labels = flat("labels", batch.labels);
    result.position_ids = flat("position_ids", batch.position_ids);
    return result;
  });
}

ThdShard thd_shard(const ThdBatch& batch, std::int64_t chunk, std::span<const std::int32_t> rows) {
  return with_memory_errors("thd_shard", [&]() -> ThdShard {
    const Check check("thd_shard");
    check.in_range("chunk", chunk, 0, batch.layout.chunks - 1);
    const auto outside = std::find_if(rows.begin(), rows.end(), [&](std::int32_t row) {
      return row < 0 || row >= batch.layout.tokens;
    });
    if (outside != rows.end()) {
      check.in_range(fmt::format("rows[{}]", outside - rows.begin()).c_str(), *outside, 0,
                     batch.layout.tokens - 1);
    }
    check_token_count(check, batch.layout, "input_ids", batch.input_ids.size());
    check_token_count(check, batch.layout, "labels", batch.labels.size());
    check_token_count(check, batch.layout, "position_ids", batch.position_ids.size());
    check_token_count(check, batch.layout, "padding_mask", batch.layout.padding_mask.size());
    const std::int64_t first = chunk * batch.layout.tokens;
    return {.query_rows = {rows.begin(), rows.end()},
            .input_ids = gathered(batch.input_ids, first, rows),
            .labels = gathered(batch.labels, first, rows),
            .position_ids = gathered(batch.position_ids, first, rows),
            .padding_mask = gathered(batch.layout.padding_mask, first, rows)};
  });
}

}  // namespace winnow
