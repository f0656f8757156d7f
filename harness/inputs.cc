// SPDX-License-Identifier: Apache-2.0
// Documents, windows and index lists of a case.
#include "harness/inputs.h"

#include <algorithm>
#include <array>
#include <limits>
#include <numeric>
#include <set>
#include <span>

#include "harness/random.h"
#include "harness/selected_lists.h"

namespace winnow::harness {
namespace {

/// Where a query row stands; absent rows (past the last document, or -1) have document -1.
struct Place {
  std::int64_t document = -1;
  std::int64_t first_row = 0;  // of the document
  std::int64_t position = 0;   // in the document
  std::int64_t real_length = 0;
  bool padding() const { return position >= real_length; }
};

std::vector<Place> places_of(const Case& c, std::uint64_t seed) {
  const Documents documents = documents_of(c, seed);
  const auto& real = documents.cu_seqlens;
  const auto& slots =
      documents.cu_seqlens_padded.empty() ? documents.cu_seqlens : documents.cu_seqlens_padded;
  std::vector<Place> of_row(c.rows);
  for (std::size_t i = 0; i + 1 < slots.size(); ++i)
    for (std::int32_t row = slots[i]; row < slots[i + 1]; ++row)
      of_row[row] = {static_cast<std::int64_t>(i), slots[i], row - slots[i], real[i + 1] - real[i]};

  std::vector<Place> of_query;
  for (const std::int32_t row : query_rows_of(c))
    of_query.push_back(row < 0 ? Place{} : of_row[row]);
  return of_query;
}

/// The first pool of each document.
std::vector<std::int64_t> first_pools(const Documents& documents, std::int64_t ratio) {
  std::vector<std::int64_t> first(documents.cu_seqlens.size(), 0);
  for (std::size_t i = 0; i + 1 < first.size(); ++i)
    first[i + 1] = first[i] + (documents.cu_seqlens[i + 1] - documents.cu_seqlens[i]) / ratio;
  return first;
}

/// Draws keys that differ from each other, for one list after another.
class Drawer {
 public:
  Drawer(std::uint64_t seed, std::int64_t keys)
      : random_(seed, "index lists"), taken_(keys, false) {}

  /// Any key.
  std::int32_t draw() {
    return static_cast<std::int32_t>(
        random_.below(next_++, static_cast<std::int64_t>(taken_.size())));
  }

  /// Fills `list`, ascending, with the keys of `before` of which each stays with probability 0.9,
  /// and with new ones.
  void choose(std::span<std::int32_t> list, std::span<const std::int32_t> before) {
    std::size_t count = 0;
    const auto take = [&](std::int32_t key) {
      if (taken_[key]) return;
      taken_[key] = true;
      list[count++] = key;
    };
    for (const std::int32_t key : before)
      if (random_.below(next_++, 10) != 0) take(key);
    while (count < list.size()) take(draw());
    for (const std::int32_t key : list) taken_[key] = false;
    std::sort(list.begin(), list.end());
  }

  void shuffle(std::span<std::int32_t> list) {
    for (std::size_t i = list.size(); i > 1; --i)
      std::swap(list[i - 1], list[random_.below(next_++, static_cast<std::int64_t>(i))]);
  }

 private:
  Random random_;
  std::int64_t next_ = 0;
  std::vector<bool> taken_;
};

std::vector<std::int32_t> drawn_lists(const Case& c, std::uint64_t seed, std::int64_t rows,
                                      std::int64_t keys, std::int64_t topk) {
  std::vector<std::int32_t> indices(rows * topk, -1);
  Drawer drawer(seed, keys);
  std::span<std::int32_t> before;
  for (std::int64_t t = 0; t < rows; ++t) {
    const std::span row = std::span(indices).subspan(t * topk, topk);
    if (c.slots == Slots::with_repeats && keys > 0) {
      for (std::int32_t& index : row) index = drawer.draw();
      continue;
    }
    const std::span list = row.first(std::min(topk, keys));  // further slots stay -1
    drawer.choose(list, before);
    if (c.slots == Slots::shuffled) drawer.shuffle(list);
    if (c.slots == Slots::neighbours) before = list;
  }
  return indices;
}

/// Selected ones; every slice of a batch is a document of its own. Rows and pools together count as
/// one sequence.
std::vector<std::int32_t> lists_of_slices(const Case& c, std::uint64_t seed, std::int64_t rows,
                                          std::int64_t keys, std::int64_t topk) {
  std::vector<std::int32_t> indices;
  for (std::int64_t first = 0; first < rows; first += c.tokens) {
    const std::int64_t ratio = keys < c.keys() ? c.ratio : 1;  // of pools alone
    const std::vector<std::int32_t> lists =
        selected_lists(seed + first, c.tokens, keys, topk, ratio);
    indices.insert(indices.end(), lists.begin(), lists.end());
  }
  return indices;
}

bool is_empty_row(const Case& c, std::int64_t t) { return c.empty_rows && t % 3 == 1; }

std::int32_t invalid_index(const Random& random, std::int64_t draw, std::int64_t keys) {
  const auto first_past = static_cast<std::int32_t>(keys);
  const std::array<std::int32_t, 5> choices{-1, first_past, first_past + 7,
                                            std::numeric_limits<std::int32_t>::max(),
                                            std::numeric_limits<std::int32_t>::min()};
  return choices[random.below(draw, choices.size())];
}

}  // namespace

Documents documents_of(const Case& c, std::uint64_t seed) {
  const Random random(seed, "documents");
  const bool uneven = c.documents > 1 && !c.even_documents;
  const std::int64_t last = uneven ? c.rows - c.rows / 16 : c.rows;
  std::vector<std::int32_t> offsets{0};
  for (std::int64_t i = 1; i < c.documents; ++i)
    offsets.push_back(
        static_cast<std::int32_t>(uneven ? random.below(i, last + 1) : i * last / c.documents));
  std::sort(offsets.begin(), offsets.end());
  if (uneven && c.documents >= 3) offsets[2] = offsets[1];  // an empty document
  offsets.push_back(static_cast<std::int32_t>(last));
  if (!c.padded) return {offsets, {}};

  Documents result{{0}, offsets};
  for (std::size_t i = 0; i + 1 < offsets.size(); ++i) {
    const std::int32_t slots = offsets[i + 1] - offsets[i];
    const auto padding =
        static_cast<std::int32_t>(random.below(c.documents + static_cast<std::int64_t>(i), 4));
    result.cu_seqlens.push_back(result.cu_seqlens.back() + slots - std::min(slots, padding));
  }
  return result;
}

std::vector<std::int32_t> query_rows_of(const Case& c) {
  std::vector<std::int32_t> rows(c.tokens, -1);
  for (std::int64_t t = 0; t < c.tokens; ++t) {
    if (c.rows == 0 || is_empty_row(c, t)) continue;
    rows[t] = static_cast<std::int32_t>(c.tokens <= c.rows ? c.rows - c.tokens + t : t % c.rows);
  }
  return rows;
}

std::int64_t Windows::total() const {
  std::int64_t sum = 0;
  for (std::size_t t = 0; t < begin.size(); ++t) sum += end[t] - begin[t];
  return sum;
}

std::vector<bool> Windows::seen(std::int64_t keys) const {
  std::vector<std::int32_t> change(keys + 1, 0);
  for (std::size_t t = 0; t < begin.size(); ++t) {
    ++change[begin[t]];
    --change[end[t]];
  }
  std::partial_sum(change.begin(), change.end(), change.begin());
  return {change.begin(), change.end() - 1};
}

Windows windows_of(const Case& c, std::uint64_t seed, std::int32_t ratio,
                   PaddingRows padding_rows) {
  const std::vector<std::int64_t> pools = first_pools(documents_of(c, seed), ratio);
  Windows windows;
  for (const Place& place : places_of(c, seed)) {
    std::int64_t begin = 0;
    std::int64_t seen = 0;
    if (place.document >= 0) {
      begin = ratio > 1 ? pools[place.document] : place.first_row;
      seen = std::min(place.position + 1, place.real_length) / ratio;
      if (place.padding() && padding_rows == PaddingRows::empty) seen = 0;
      if (place.padding() && padding_rows == PaddingRows::see_document && ratio == 1)
        seen = std::max<std::int64_t>(seen, 1);
    }
    windows.begin.push_back(static_cast<std::int32_t>(begin));
    windows.end.push_back(static_cast<std::int32_t>(begin + seen));
  }
  return windows;
}

bool IndexLists::valid(std::int64_t t, std::int64_t j) const {
  if (!lengths.empty() && j >= lengths[t]) return false;
  const std::int32_t index = indices[t * topk + j];
  return index >= 0 && index < keys;
}

bool IndexLists::has_keys(std::int64_t t) const {
  for (std::int64_t j = 0; j < topk; ++j)
    if (valid(t, j)) return true;
  return false;
}

std::int64_t IndexLists::valid_slots() const {
  std::int64_t count = 0;
  const auto rows = static_cast<std::int64_t>(indices.size()) / topk;
  for (std::int64_t t = 0; t < rows; ++t)
    for (std::int64_t j = 0; j < topk; ++j) count += valid(t, j) ? 1 : 0;
  return count;
}

std::vector<bool> IndexLists::used(std::int64_t first, std::int64_t last) const {
  std::vector<bool> result(keys, false);
  for (std::int64_t t = first; t < last; ++t)
    for (std::int64_t j = 0; j < topk; ++j)
      if (valid(t, j)) result[indices[t * topk + j]] = true;
  return result;
}

IndexLists index_lists(const Case& c, std::uint64_t seed, std::int64_t rows, std::int64_t keys,
                       std::int64_t topk) {
  IndexLists lists{keys, topk, {}, {}};
  lists.indices = c.slots == Slots::selected ? lists_of_slices(c, seed, rows, keys, topk)
                                             : drawn_lists(c, seed, rows, keys, topk);

  const Random faults(seed, "faults of index lists");
  for (std::int64_t i = 0; i < rows * topk; ++i)
    if (c.no_valid_slot || is_empty_row(c, i / topk) || (c.holes && faults.below(2 * i, 8) == 0))
      lists.indices[i] = invalid_index(faults, 2 * i + 1, keys);

  const Random lengths(seed, "lengths of index lists");
  for (std::int64_t t = 0; c.lengths && t < rows; ++t)
    lists.lengths.push_back(static_cast<std::int32_t>(lengths.below(t, topk + 1)));
  return lists;
}

WindowLists window_lists(const Case& c, std::uint64_t seed,
                         const std::vector<std::int32_t>& pool_ids) {
  const Windows pools = windows_of(c, seed, c.ratio);
  const std::vector<Place> places = places_of(c, seed);
  WindowLists lists;
  for (std::int64_t t = 0; t < c.tokens; ++t) {
    std::vector<std::int32_t>& list = lists.emplace_back();
    const Place& place = places[t];
    if (place.document < 0 || place.padding()) continue;
    for (std::int64_t p = std::max<std::int64_t>(0, place.position - c.window + 1);
         p <= place.position; ++p)
      list.push_back(static_cast<std::int32_t>(place.first_row + p));
    if (!c.has_pools()) continue;
    const auto add_if_seen = [&](std::int32_t pool) {
      if (pool >= pools.begin[t] && pool < pools.end[t]) list.push_back(c.key_offset() + pool);
    };
    if (pool_ids.empty())
      for (std::int32_t pool = pools.begin[t]; pool < pools.end[t]; ++pool) add_if_seen(pool);
    else
      for (std::int64_t j = 0; j < c.index_topk(); ++j)
        add_if_seen(pool_ids[t * c.index_topk() + j]);
  }
  return lists;
}

std::vector<std::int64_t> sampled_rows(const Case& c, std::uint64_t seed, std::int64_t count) {
  if (!(c.full || c.slow) || c.tokens <= count) {
    std::vector<std::int64_t> rows(c.tokens);
    std::iota(rows.begin(), rows.end(), 0);
    return rows;
  }

  const Random random(seed, "sampled rows");
  std::set<std::int64_t> sample{0, c.tokens - 1};
  for (std::int64_t i = 0; static_cast<std::int64_t>(sample.size()) < count; ++i)
    sample.insert(random.below(i, c.tokens));
  return {sample.begin(), sample.end()};
}

}  // namespace winnow::harness
