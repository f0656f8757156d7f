// SPDX-License-Identifier: Apache-2.0
// Random padded batches of packed documents.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "tests/testing.h"

namespace winnow::tests {

using Longs = std::vector<std::int64_t>;

inline constexpr std::int64_t kFill = -1000;

/// PaddedDocuments with their own memory.
struct Documents {
  std::int64_t rows;
  std::int64_t row_tokens;
  Longs seq_lens;
  Longs seq_lens_padded;
  std::int64_t fill = kFill;

  PaddedDocuments view() const { return {rows, row_tokens, seq_lens, seq_lens_padded, fill}; }
};

inline Longs counted(std::int64_t count, std::int64_t first) {
  Longs values(static_cast<std::size_t>(count));
  std::iota(values.begin(), values.end(), first);
  return values;
}

/// Random rows of documents with padding, sometimes only after the last one.
inline Documents random_documents(std::uint64_t seed) {
  const Random random(seed, "documents");
  std::int64_t draw = 0;
  const auto below = [&](std::int64_t limit) { return random.below(draw++, limit); };
  const std::int64_t rows = 1 + below(6);
  const std::int64_t row_tokens = 8 + below(40);
  const bool padding_at_the_end_alone = below(3) == 0;
  std::vector<Longs> real(static_cast<std::size_t>(rows)), padded(real);
  std::size_t width = 0;
  for (std::size_t r = 0; r < real.size(); ++r) {
    for (std::int64_t left = row_tokens; left > 0;) {
      const std::int64_t slots = below(4) == 0 ? left : 1 + below(left);
      const bool may_be_padded =
          !padding_at_the_end_alone || (slots == left && r + 1 == real.size());
      padded[r].push_back(slots);
      real[r].push_back(may_be_padded ? below(slots + 1) : slots);
      left -= slots;
    }
    width = std::max(width, real[r].size());
  }
  Documents documents{rows, row_tokens, {}, {}};
  for (std::size_t r = 0; r < real.size(); ++r) {
    real[r].resize(width, kFill);
    padded[r].resize(width, kFill);
    documents.seq_lens.insert(documents.seq_lens.end(), real[r].begin(), real[r].end());
    documents.seq_lens_padded.insert(documents.seq_lens_padded.end(), padded[r].begin(),
                                     padded[r].end());
  }
  return documents;
}

}  // namespace winnow::tests
