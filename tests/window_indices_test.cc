// SPDX-License-Identifier: Apache-2.0
// window_indices: golden lists, given pool ids, padding, and lists wider than needed.
#include <array>

#include "tests/testing.h"

namespace winnow::tests {
namespace {

using List = Ints;

/// One call as plain vectors.
struct Lists {
  Ints cu_seqlens;
  Ints padded{};      // empty: absent
  Ints query_rows{};  // empty: absent, then there are `tokens` rows
  std::int64_t tokens = 0;
  std::int32_t window = 0;
  std::int32_t ratio = 0;
  std::int32_t key_offset = 0;
  std::vector<List> pool_ids{};  // empty: absent
  std::int64_t topk = 1;
};

/// The lists without the -1 after their entries.
std::vector<List> lists_of(const Lists& lists, Backend backend) {
  const Device device = harness::device_of(backend);
  const auto size = [](const Ints& values) { return static_cast<std::int64_t>(values.size()); };
  const std::int64_t tokens = lists.query_rows.empty() ? lists.tokens : size(lists.query_rows);
  const Buffer cu_seqlens = ints(device, {size(lists.cu_seqlens)}, lists.cu_seqlens);
  Buffer padded, query_rows, pool_ids;
  if (!lists.padded.empty()) padded = ints(device, {size(lists.padded)}, lists.padded);
  if (!lists.query_rows.empty()) query_rows = ints(device, {tokens}, lists.query_rows);
  if (!lists.pool_ids.empty()) {
    Ints flat;
    for (const List& ids : lists.pool_ids) flat.insert(flat.end(), ids.begin(), ids.end());
    pool_ids = ints(device, {tokens, size(lists.pool_ids[0])}, flat);
  }
  const Buffer indices(device, DType::i32, {tokens, lists.topk});
  const Buffer lengths(device, DType::i32, {tokens});
  window_indices({.cu_seqlens = cu_seqlens.tensor(),
                  .cu_seqlens_padded = padded.tensor(),
                  .query_rows = query_rows.tensor(),
                  .window = lists.window,
                  .ratio = lists.ratio,
                  .key_offset = lists.key_offset,
                  .pool_ids = pool_ids.tensor(),
                  .indices = indices.tensor(),
                  .lengths = lengths.tensor()},
                 on(backend));
  expect_canaries_intact(cu_seqlens, padded, query_rows, pool_ids, indices, lengths);

  const Ints flat = indices.download_ints();
  const Ints counts = lengths.download_ints();
  std::vector<List> result;
  for (std::int64_t t = 0; t < tokens; ++t) {
    List list = part(flat, t * lists.topk, lists.topk);
    EXPECT_TRUE(counts[t] >= 0 && counts[t] <= lists.topk) << counts[t];
    for (std::int64_t j = 0; j < lists.topk; ++j)
      EXPECT_EQ(list[j] == -1, j >= counts[t]) << "row " << t << " slot " << j;
    list.resize(static_cast<std::size_t>(counts[t]));
    result.push_back(list);
  }
  return result;
}

void expect_lists(const Lists& lists, const std::vector<List>& expected) {
  on_each_backend([&](Backend backend) { EXPECT_EQ(lists_of(lists, backend), expected); });
}

TEST(WindowIndices, AreWindowThenPools) {
  expect_lists({.cu_seqlens = {0, 8},
                .query_rows = {4, 5},
                .window = 4,
                .ratio = 4,
                .key_offset = 8,
                .topk = 6},
               {{1, 2, 3, 4, 8}, {2, 3, 4, 5, 8}});
}

TEST(WindowIndices, OfFirstRowsAreShort) {
  expect_lists({.cu_seqlens = {0, 5}, .tokens = 5, .window = 3, .topk = 3},
               {{0}, {0, 1}, {0, 1, 2}, {1, 2, 3}, {2, 3, 4}});
}

TEST(WindowIndices, StayInTheirDocument) {
  expect_lists({.cu_seqlens = {0, 3, 3, 6}, .tokens = 6, .window = 2, .topk = 2},
               {{0}, {0, 1}, {1, 2}, {3}, {3, 4}, {4, 5}});
  // The pools of documents follow each other: rows 0-4 have pools 0 and 1, rows 5-8 pools 2 and 3.
  expect_lists({.cu_seqlens = {0, 5, 9},
                .query_rows = {4, 5, 6, 8},
                .window = 1,
                .ratio = 2,
                .key_offset = 20,
                .topk = 3},
               {{4, 20, 21}, {5}, {6, 22}, {8, 22, 23}});
}

TEST(WindowIndices, OfPoolsAloneHaveNoWindow) {
  expect_lists(
      {.cu_seqlens = {0, 6}, .tokens = 6, .window = 0, .ratio = 3, .key_offset = 6, .topk = 2},
      {{}, {}, {6}, {6}, {6}, {6, 7}});
}

TEST(WindowIndices, OfTheWindowAloneIgnoreTheKeyOffset) {
  expect_lists({.cu_seqlens = {0, 3}, .tokens = 3, .window = 2, .key_offset = 1, .topk = 2},
               {{0}, {0, 1}, {1, 2}});
}

TEST(WindowIndices, WithNeitherWindowNorPoolsAreEmpty) {
  expect_lists({.cu_seqlens = {0, 2}, .tokens = 2, .topk = 3}, {{}, {}});
}

TEST(WindowIndices, OfAWindowWiderThanEveryDocument) {
  expect_lists({.cu_seqlens = {0, 2, 5}, .tokens = 5, .window = kMaxInt32, .topk = 3},
               {{0}, {0, 1}, {2}, {2, 3}, {2, 3, 4}});
}

TEST(WindowIndices, KeepGivenPoolsThatTheRowMaySee) {
  // Row 7 sees the pools 0 and 1 of its document; other, negative and huge ids are dropped.
  expect_lists({.cu_seqlens = {0, 12},
                .query_rows = {7, 7, 7, 3},
                .window = 1,
                .ratio = 4,
                .key_offset = 12,
                .pool_ids = {{-1, 0, 99}, {1, 0, 2}, {kMaxInt32, kMinInt32, -2}, {0, 1, 2}},
                .topk = 4},
               {{7, 12}, {7, 13, 12}, {7}, {3, 12}});
}

TEST(WindowIndices, KeepGivenPoolsOfTheOwnDocumentOnly) {
  // Documents of 4 rows have two pools each: 0, 1 and 2, 3.
  expect_lists({.cu_seqlens = {0, 4, 8},
                .query_rows = {3, 7, 5},
                .window = 1,
                .ratio = 2,
                .key_offset = 8,
                .pool_ids = {{3, 2, 1, 0}, {3, 2, 1, 0}, {3, 2, 1, 0}},
                .topk = 5},
               {{3, 9, 8}, {7, 11, 10}, {5, 10}});
}

TEST(WindowIndices, MayRepeatAGivenPool) {
  expect_lists({.cu_seqlens = {0, 4},
                .query_rows = {3},
                .window = 1,
                .ratio = 2,
                .key_offset = 4,
                .pool_ids = {{1, 1}},
                .topk = 3},
               {{3, 5, 5}});
}

TEST(WindowIndices, OfPaddingRowsAreEmpty) {
  expect_lists({.cu_seqlens = {0, 2, 5},
                .padded = {0, 4, 8},
                .tokens = 10,
                .window = 2,
                .ratio = 2,
                .key_offset = 8,
                .topk = 3},
               {{0}, {0, 1, 8}, {}, {}, {4}, {4, 5, 9}, {5, 6, 9}, {}, {}, {}});
}

TEST(WindowIndices, OfAQueryRowOfMinusOneAreEmpty) {
  expect_lists({.cu_seqlens = {0, 3}, .query_rows = {-1, 2, kMaxInt32}, .window = 2, .topk = 2},
               {{}, {1, 2}, {}});
}

TEST(WindowIndices, WiderThanNeededAreFilledUp) {
  // lists_of expects -1 in every slot after the entries.
  expect_lists({.cu_seqlens = {0, 3}, .tokens = 3, .window = 2, .topk = 11}, {{0}, {0, 1}, {1, 2}});
}

TEST(WindowIndices, NeedOnlyTheWidthOfTheRowsAskedFor) {
  // Row 7 would list 4 + 2 entries; rows 0 and 1 list at most two.
  expect_lists({.cu_seqlens = {0, 8},
                .query_rows = {0, 1},
                .window = 4,
                .ratio = 4,
                .key_offset = 8,
                .topk = 2},
               {{0}, {0, 1}});
}

TEST(WindowIndices, OfNoRowsAreNone) {
  expect_lists({.cu_seqlens = {0, 3}, .window = 2, .topk = 2}, {});
}

TEST(WindowIndices, OfRandomPackingsFollowTheDefinition) {
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    SCOPED_TRACE(seed);
    const Random random(seed, "lists");
    std::int64_t draw = 0;
    Lists lists{.cu_seqlens = {0}, .padded = {0}};
    for (std::int64_t i = random.below(draw++, 5); i > 0; --i) {
      const auto real = static_cast<std::int32_t>(random.below(draw++, 9));
      const auto padding = static_cast<std::int32_t>(random.below(draw++, 3));
      lists.cu_seqlens.push_back(lists.cu_seqlens.back() + real);
      lists.padded.push_back(lists.padded.back() + real + padding);
    }
    lists.window = static_cast<std::int32_t>(random.below(draw++, 6));
    lists.ratio = std::array{0, 2, 3, 4}[random.below(draw++, 4)];
    lists.key_offset = lists.padded.back() + static_cast<std::int32_t>(random.below(draw++, 3));
    lists.tokens = lists.padded.back() + 1;
    lists.topk = 20;

    // By definition, a row lists the real rows of its document at most `window` - 1 before it, then
    // the pools whose last row it has reached.
    std::vector<List> expected(static_cast<std::size_t>(lists.tokens));
    std::int32_t pool_begin = 0;
    for (std::size_t i = 0; i + 1 < lists.padded.size(); ++i) {
      const std::int32_t real = lists.cu_seqlens[i + 1] - lists.cu_seqlens[i];
      for (std::int32_t p = 0; p < real; ++p) {
        List& list = expected[lists.padded[i] + p];
        for (std::int32_t s = 0; s <= p; ++s)
          if (p - s < lists.window) list.push_back(lists.padded[i] + s);
        for (std::int32_t e = 0; lists.ratio > 0 && (e + 1) * lists.ratio - 1 <= p; ++e)
          list.push_back(lists.key_offset + pool_begin + e);
      }
      if (lists.ratio > 0) pool_begin += real / lists.ratio;
    }
    expect_lists(lists, expected);
  }
}

TEST(WindowIndices, SeeThePoolsThatKeyWindowsGives) {
  on_each_backend([](Backend backend) {
    const Device device = harness::device_of(backend);
    const Ints offsets = {0, 7, 7, 18, 20};
    const Ints padded = {0, 9, 11, 22, 26};
    const std::int64_t tokens = 26;
    const Buffer cu_seqlens = ints(device, {5}, offsets);
    const Buffer cu_seqlens_padded = ints(device, {5}, padded);
    const Buffer begin(device, DType::i32, {tokens});
    const Buffer end(device, DType::i32, {tokens});
    key_windows({.cu_seqlens = cu_seqlens.tensor(),
                 .cu_seqlens_padded = cu_seqlens_padded.tensor(),
                 .query_rows = {},
                 .ratio = 3,
                 .begin = begin.tensor(),
                 .end = end.tensor()},
                on(backend));
    const Ints first = begin.download_ints();
    const Ints last = end.download_ints();
    const std::vector<List> lists = lists_of({.cu_seqlens = offsets,
                                              .padded = padded,
                                              .tokens = tokens,
                                              .ratio = 3,
                                              .key_offset = 100,
                                              .topk = 5},
                                             backend);
    for (std::int64_t t = 0; t < tokens; ++t) {
      List pools;
      for (std::int32_t e = first[t]; e < last[t]; ++e) pools.push_back(100 + e);
      EXPECT_EQ(lists[t], pools) << "row " << t;
    }
  });
}

// To look through the documents for every row would take longer than a test may.
TEST(WindowIndices, OfAMillionDocumentsInDescendingOrderAreChecked) {
  constexpr std::int32_t kDocuments = 1'000'000;
  Ints offsets, rows;
  for (std::int32_t i = 0; i <= kDocuments; ++i) offsets.push_back(i);
  for (std::int32_t i = kDocuments; i > 0; --i) rows.push_back(i - 1);
  const Buffer cu_seqlens = ints({}, {kDocuments + 1}, offsets);
  const Buffer query_rows = ints({}, {kDocuments}, rows);
  const Buffer indices({}, DType::i32, {kDocuments, 1});
  const Buffer lengths({}, DType::i32, {kDocuments});
  const WindowIndices args{.cu_seqlens = cu_seqlens.tensor(),
                           .query_rows = query_rows.tensor(),
                           .window = 3,
                           .indices = indices.tensor(),
                           .lengths = lengths.tensor()};
  EXPECT_EQ(why_not(args, on(Backend::reference)), "");
  EXPECT_EQ(why_not(args, on(Backend::cpu)), "");
  window_indices(args, on(Backend::cpu));
  EXPECT_EQ(indices.download_ints(), rows);
  EXPECT_EQ(lengths.download_ints(), Ints(kDocuments, 1));
}

}  // namespace
}  // namespace winnow::tests
