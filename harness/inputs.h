// SPDX-License-Identifier: Apache-2.0
// What a case's integer inputs hold: documents, the windows that follow from them, index lists.
#pragma once

#include <cstdint>
#include <vector>

#include "harness/cases.h"
#include "winnow/key_windows.h"

namespace winnow::harness {

/// Packed documents in the form that key_windows takes.
struct Documents {
  std::vector<std::int32_t> cu_seqlens;
  std::vector<std::int32_t> cu_seqlens_padded;  // empty: the same
};
Documents documents_of(const Case& c, std::uint64_t seed);

/// The global row of each query, or -1.
std::vector<std::int32_t> query_rows_of(const Case& c);

/// begin and end of every query, found by walking through the documents.
struct Windows {
  std::vector<std::int32_t> begin;
  std::vector<std::int32_t> end;

  std::int64_t length(std::int64_t t) const { return end[t] - begin[t]; }
  /// Keys of all windows together.
  std::int64_t total() const;
  /// For each of `keys` keys whether any query may see it.
  std::vector<bool> seen(std::int64_t keys) const;
};
Windows windows_of(const Case& c, std::uint64_t seed, std::int32_t ratio,
                   PaddingRows padding_rows = PaddingRows::empty);

/// Index lists of a case, one row after another.
struct IndexLists {
  std::int64_t keys = 0;
  std::int64_t topk = 0;
  std::vector<std::int32_t> indices;
  std::vector<std::int32_t> lengths;  // empty: all slots count

  bool valid(std::int64_t t, std::int64_t j) const;
  bool has_keys(std::int64_t t) const;
  std::int64_t valid_slots() const;
  /// For each key whether any valid slot of the rows [first, last) names it.
  std::vector<bool> used(std::int64_t first, std::int64_t last) const;
};
/// Lists over `keys` keys with the character that the case asks for; `rows` of them.
IndexLists index_lists(const Case& c, std::uint64_t seed, std::int64_t rows, std::int64_t keys,
                       std::int64_t topk);

/// The list of each query as window_indices makes it, without the -1 behind it, found by walking
/// through the documents. Without pool ids all visible pools follow the rows.
using WindowLists = std::vector<std::vector<std::int32_t>>;
WindowLists window_lists(const Case& c, std::uint64_t seed,
                         const std::vector<std::int32_t>& pool_ids);

/// All rows of a case, or `count` where it is full or slow: the first, the last, some between.
std::vector<std::int64_t> sampled_rows(const Case& c, std::uint64_t seed, std::int64_t count);

}  // namespace winnow::harness
