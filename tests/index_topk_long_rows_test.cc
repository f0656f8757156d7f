// SPDX-License-Identifier: Apache-2.0
// Selection from rows so long that a backend holds only part of them at a time: distributions of
// scores for which an estimated threshold is wrong, and values of topk of every magnitude.
#include <cmath>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tests/indexer_calls.h"

namespace winnow::tests {
namespace {

constexpr std::int64_t kKeys = 20011;

struct Content {
  std::string name;
  std::function<double(std::int64_t)> score;  // of a key
};

double uniform(std::int64_t s) {
  static const Random random(3, "long rows");
  return random.uniform(s);
}

std::vector<Content> contents() {
  return {
      {"random", [](std::int64_t s) { return uniform(s) - 0.5; }},
      {"many ties", [](std::int64_t s) { return std::floor(uniform(s) * 50); }},
      {"equal", [](std::int64_t) { return 2.5; }},
      {"ascending", [](std::int64_t s) { return static_cast<double>(s); }},
      {"descending", [](std::int64_t s) { return -static_cast<double>(s); }},
      {"zeros and a few more", [](std::int64_t s) { return s % 97 == 5 ? 1 + uniform(s) : 0.0; }},
      {"the best stand together",
       [](std::int64_t s) { return s >= 9000 && s < 12000 ? 10 + uniform(s) : uniform(s); }},
      {"one far above the others", [](std::int64_t s) { return s == 777 ? 1e30 : uniform(s); }},
      {"neighbouring floats",
       [](std::int64_t s) { return 1 + std::floor(uniform(s) * 4096) * 0x1p-23; }},
      {"every magnitude",
       [](std::int64_t s) {
         return std::ldexp(s % 2 == 0 ? 1.0 : -1.0, static_cast<int>(s % 250) - 125);
       }},
      {"infinite and NaN",
       [](std::int64_t s) {
         return s % 5 == 0 ? kNaN : s % 7 == 0 ? -kInfinity : s % 11 == 0 ? kInfinity : uniform(s);
       }},
      {"hardly any", [](std::int64_t s) { return s % 4001 == 7 ? uniform(s) : kNaN; }},
  };
}

/// One row whose window leaves out a few keys at both ends; the score of a key is max(given, 0).
Indexer row_of(const Content& content, std::int64_t keys, std::int64_t topk) {
  Indexer ix{.tokens = 1, .keys = keys, .heads = 1, .dim = 8, .topk = topk, .dtype = DType::f32};
  ix.q.assign(8, 1);
  ix.weights = {1};
  ix.k.assign(static_cast<std::size_t>(keys * 8), 0);
  for (std::int64_t s = 0; s < keys; ++s) ix.k[s * 8] = static_cast<float>(content.score(s));
  ix.begin = {5};
  ix.end = {static_cast<std::int32_t>(keys - 3)};
  return ix;
}

/// Scores of both signs, by two heads: max(a, 0) - max(-a, 0) = a.
Indexer with_signs(Indexer ix) {
  ix.heads = 2;
  ix.q.assign(16, 1);
  for (std::size_t i = 8; i < 16; ++i) ix.q[i] = -1;
  ix.weights = {1, -1};
  return ix;
}

class LongRows : public ::testing::TestWithParam<std::int64_t> {};

TEST_P(LongRows, AreSelectedExactly) {
  on_each_backend([](Backend backend) {
    for (const Content& content : contents()) {
      SCOPED_TRACE(content.name);
      for (const Indexer& ix :
           {row_of(content, kKeys, GetParam()), with_signs(row_of(content, kKeys, GetParam()))}) {
        expect_selected(select(ix, on(backend)), plain_selection(ix));
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Slots, LongRows,
                         ::testing::Values(1, 7, 100, 2048, 2560, 2561, 4096, 6144, 6145, 8192,
                                           65536));

TEST(LongRowsOf, ManySlotsAreSelectedExactly) {
  on_each_backend([](Backend backend) {
    for (const Content& content : {contents()[0], contents()[1], contents()[10]}) {
      SCOPED_TRACE(content.name);
      for (const std::int64_t topk : {2048, 20000, 65536}) {
        const Indexer ix = with_signs(row_of(content, 140001, topk));
        expect_selected(select(ix, on(backend)), plain_selection(ix));
      }
    }
  });
}

TEST(LongRowsOf, AnyLengthAreSelectedExactly) {
  on_each_backend([](Backend backend) {
    // Around the numbers of keys that backends process at a time.
    struct Border {
      std::int64_t keys, topk;
    };
    for (const Border border : {Border{3072, 2048}, {4096, 2048}, {6144, 3000}, {8192, 6144}}) {
      for (std::int64_t keys = border.keys + 8 - 4; keys <= border.keys + 8 + 5; ++keys) {
        for (std::int32_t begin = 4; begin < 8; ++begin) {
          Indexer ix = with_signs(row_of(contents()[0], keys, border.topk));
          ix.begin = {begin};
          expect_selected(select(ix, on(backend)), plain_selection(ix));
        }
      }
    }
  });
}

TEST(LongRowsOf, InfiniteScoresAreSelectedExactly) {
  on_each_backend([](Backend backend) {
    for (const std::int64_t keys : {3000, 30011}) {
      for (const double infinite : {kInfinity, -kInfinity}) {
        for (const int step : {1, 1000}) {
          Indexer ix = with_signs(row_of(contents()[0], keys, 2048));
          for (std::int64_t s = 1777; s < keys; s += step * 2) ix.k[s * 8] = infinite;
          expect_selected(select(ix, on(backend)), plain_selection(ix));
        }
      }
    }
  });
}

TEST(LongRowsOf, ManySlotsAreSortedByScore) {
  on_each_backend([](Backend backend) {
    for (const std::int64_t topk : {100, 2500, 20000}) {
      Indexer ix = with_signs(row_of(contents()[1], 30011, topk));
      ix.order = SlotOrder::by_score;
      expect_selected(select(ix, on(backend)), plain_selection(ix));
    }
  });
}

}  // namespace
}  // namespace winnow::tests
