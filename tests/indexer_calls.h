// SPDX-License-Identifier: Apache-2.0
// One call of index_topk as plain vectors, and a reference selection by sorting.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "tests/testing.h"

namespace winnow::tests {

struct Indexer {
  std::int64_t tokens = 5;
  std::int64_t keys = 40;
  std::int64_t heads = 3;
  std::int64_t dim = 16;
  std::int64_t topk = 8;
  DType dtype = DType::bf16;
  SlotOrder order = SlotOrder::ascending;
  std::int64_t row_padding = 0;

  Values q{}, k{}, weights{};
  Values k_scale{};  // empty: absent
  Ints begin{}, end{};

  // Replay and backward.
  Ints indices{};
  Ints lengths{};  // empty: absent
  Values d_scores{};
  DType d_k_type = DType::f32;
  Values d_k_before{};  // empty: zeros

  DType sum_type() const { return type_of_sums(dtype); }
};

struct Selected {
  Ints indices, lengths;
  Values scores;
};

struct IndexGradients {
  Values d_q, d_weights, d_k;
};

/// Windows of every kind: all keys, part of them, few, none.
inline void fill_windows(Indexer& ix) {
  for (std::int64_t t = 0; t < ix.tokens; ++t) {
    const std::int64_t begin = t % 5 == 0 ? 0 : ix.keys * (t % 3) / 7;
    const std::int64_t lengths[] = {ix.keys, ix.keys - begin, std::min<std::int64_t>(ix.keys, 3),
                                    (ix.keys - begin) / 2, 0};
    ix.begin.push_back(static_cast<std::int32_t>(begin));
    ix.end.push_back(static_cast<std::int32_t>(std::min(begin + lengths[t % 5], ix.keys)));
  }
}

/// Normally distributed values.
inline Indexer filled(Indexer ix, std::uint64_t seed) {
  ix.q = normals(ix.tokens * ix.heads * ix.dim, seed, "q");
  ix.k = normals(ix.keys * ix.dim, seed, "k");
  ix.weights = normals(ix.tokens * ix.heads, seed, "weights");
  ix.d_scores = normals(ix.tokens * ix.topk, seed, "d_scores");
  fill_windows(ix);
  return ix;
}

/// Small integers: every sum is exact in every type, and there are many ties.
inline Indexer filled_exactly(Indexer ix, std::uint64_t seed) {
  ix.q = whole_numbers(ix.tokens * ix.heads * ix.dim, seed, "q", -2, 2);
  ix.k = whole_numbers(ix.keys * ix.dim, seed, "k", -2, 2);
  ix.weights = whole_numbers(ix.tokens * ix.heads, seed, "weights", -3, 3);
  ix.d_scores = whole_numbers(ix.tokens * ix.topk, seed, "d_scores", -2, 2);
  fill_windows(ix);
  return ix;
}

/// The same call with only the query rows [first, first + count).
inline Indexer rows_of(const Indexer& ix, std::int64_t first, std::int64_t count) {
  Indexer result = ix;
  result.tokens = count;
  result.q = part(ix.q, first * ix.heads * ix.dim, count * ix.heads * ix.dim);
  result.weights = part(ix.weights, first * ix.heads, count * ix.heads);
  result.begin = part(ix.begin, first, count);
  result.end = part(ix.end, first, count);
  if (!ix.indices.empty()) result.indices = part(ix.indices, first * ix.topk, count * ix.topk);
  if (!ix.lengths.empty()) result.lengths = part(ix.lengths, first, count);
  if (!ix.d_scores.empty()) result.d_scores = part(ix.d_scores, first * ix.topk, count * ix.topk);
  return result;
}

inline Selected rows_of(const Indexer& ix, const Selected& selected, std::int64_t first,
                        std::int64_t count) {
  return {part(selected.indices, first * ix.topk, count * ix.topk),
          part(selected.lengths, first, count),
          part(selected.scores, first * ix.topk, count * ix.topk)};
}

/// Buffers and arguments of a forward call. indices, lengths and scores are outputs; with `replay`
/// the given indices and lengths are inputs.
struct IndexForwardWork {
  IndexForwardWork(const Indexer& ix, Device device, bool replay)
      : indices(memory.add("indices",
                           Buffer(device, DType::i32, {ix.tokens, ix.topk}, ix.row_padding))),
        lengths(memory.add("lengths", replay && ix.lengths.empty()
                                          ? Buffer()
                                          : Buffer(device, DType::i32, {ix.tokens}))),
        scores(memory.add("scores",
                          Buffer(device, ix.sum_type(), {ix.tokens, ix.topk}, ix.row_padding))) {
    memory.add("q", floats(device, ix.dtype, {ix.tokens, ix.heads, ix.dim}, ix.q, ix.row_padding));
    memory.add("k", floats(device, ix.dtype, {ix.keys, ix.dim}, ix.k, ix.row_padding));
    memory.add("weights",
               floats(device, ix.sum_type(), {ix.tokens, ix.heads}, ix.weights, ix.row_padding));
    if (ix.dtype == DType::f8_e4m3)
      memory.add("k_scale", floats(device, DType::f32, {ix.keys}, ix.k_scale));
    memory.add("begin", ints(device, {ix.tokens}, ix.begin));
    memory.add("end", ints(device, {ix.tokens}, ix.end));
    if (replay) indices.upload(ix.indices);
    if (replay) lengths.upload(ix.lengths);
    args = memory.arguments<IndexTopkForward>();
    args.order = ix.order;
    args.replay = replay;
  }

  Selected selected() const {
    expect_canaries_intact(memory);
    return {indices.download_ints(), lengths.download_ints(), scores.download()};
  }

  NamedBuffers memory;
  Buffer &indices, &lengths, &scores;
  IndexTopkForward args;
};

inline Selected select(const Indexer& ix, const Execution& execution) {
  const IndexForwardWork work(ix, harness::device_of(execution.backend), false);
  run_where_taken(work.args, execution);
  return work.selected();
}

/// Replays ix.indices and returns their scores.
inline Values replay(const Indexer& ix, const Execution& execution) {
  const IndexForwardWork work(ix, harness::device_of(execution.backend), true);
  run_where_taken(work.args, execution);
  const Selected selected = work.selected();
  EXPECT_EQ(selected.indices, ix.indices);
  EXPECT_EQ(selected.lengths, ix.lengths);
  return selected.scores;
}

/// Buffers and arguments of a backward call over ix.indices.
struct IndexBackwardWork {
  IndexBackwardWork(const Indexer& ix, Device device)
      : forward(ix, device, true),
        d_q(forward.memory.add(
            "d_q", Buffer(device, ix.dtype, {ix.tokens, ix.heads, ix.dim}, ix.row_padding))),
        d_weights(forward.memory.add(
            "d_weights", Buffer(device, ix.sum_type(), {ix.tokens, ix.heads}, ix.row_padding))),
        d_k(forward.memory.add("d_k", sum(device, ix.dtype, ix.d_k_type, {ix.keys, ix.dim},
                                          ix.d_k_before, ix.row_padding))) {
    forward.memory.add("d_scores", floats(device, ix.sum_type(), {ix.tokens, ix.topk}, ix.d_scores,
                                          ix.row_padding));
    args = forward.memory.arguments<IndexTopkBackward>();
  }

  IndexGradients gradients() const {
    expect_canaries_intact(forward.memory);
    return {d_q.download(), d_weights.download(), d_k.download()};
  }

  IndexForwardWork forward;
  Buffer &d_q, &d_weights, &d_k;
  IndexTopkBackward args;
};

inline IndexGradients backward(const Indexer& ix, const Execution& execution) {
  const IndexBackwardWork work(ix, harness::device_of(execution.backend));
  run_where_taken(work.args, execution);
  return work.gradients();
}

// ---- Reference.

/// Scores of all keys of a row in double, on the stored (rounded) values.
struct PlainScores {
  Values of_key;     // [keys]
  double scale = 0;  // the largest sum of magnitudes in the window
};

inline PlainScores plain_scores(const Indexer& ix, std::int64_t t) {
  const Values q = as_stored(ix.dtype, part(ix.q, t * ix.heads * ix.dim, ix.heads * ix.dim));
  PlainScores result;
  for (std::int64_t s = 0; s < ix.keys; ++s) {
    const Values k = as_stored(ix.dtype, part(ix.k, s * ix.dim, ix.dim));
    const double k_scale = ix.k_scale.empty() ? 1 : harness::rounded(DType::f32, ix.k_scale[s]);
    double score = 0;
    double magnitude = 0;
    for (std::int64_t h = 0; h < ix.heads; ++h) {
      const double w = harness::rounded(ix.sum_type(), ix.weights[t * ix.heads + h]);
      double a = 0;
      for (std::int64_t d = 0; d < ix.dim; ++d) {
        a += q[h * ix.dim + d] * k[d] * k_scale;
        magnitude += std::abs(w * q[h * ix.dim + d] * k[d] * k_scale);
      }
      score += w * (a < 0 ? 0 : a);  // NaN stays NaN
    }
    result.of_key.push_back(harness::rounded(ix.sum_type(), score));
    if (s >= ix.begin[t] && s < ix.end[t] && std::isfinite(magnitude))
      result.scale = std::max(result.scale, magnitude);
  }
  return result;
}

/// What index_topk must select if every sum is exact.
inline Selected plain_selection(const Indexer& ix) {
  Selected result;
  for (std::int64_t t = 0; t < ix.tokens; ++t) {
    const Values scores = plain_scores(ix, t).of_key;
    Ints chosen;
    for (std::int32_t s = ix.begin[t]; s < ix.end[t]; ++s)
      if (!std::isnan(scores[s]) && scores[s] != -kInfinity) chosen.push_back(s);
    std::stable_sort(chosen.begin(), chosen.end(),
                     [&](std::int32_t a, std::int32_t b) { return scores[a] > scores[b]; });
    if (static_cast<std::int64_t>(chosen.size()) > ix.topk)
      chosen.resize(static_cast<std::size_t>(ix.topk));
    if (ix.order == SlotOrder::ascending) std::sort(chosen.begin(), chosen.end());
    result.lengths.push_back(static_cast<std::int32_t>(chosen.size()));
    for (std::int64_t j = 0; j < ix.topk; ++j) {
      const bool valid = j < static_cast<std::int64_t>(chosen.size());
      result.indices.push_back(valid ? chosen[j] : -1);
      result.scores.push_back(valid ? scores[chosen[j]] : -kInfinity);
    }
  }
  return result;
}

/// Expects equal values; +0 equals -0.
inline void expect_selected(const Selected& actual, const Selected& expected) {
  EXPECT_EQ(actual.lengths, expected.lengths);
  EXPECT_TRUE(ok(harness::compare_exactly("indices", actual.indices, expected.indices)));
  EXPECT_TRUE(ok(harness::compare_exactly("scores", actual.scores, expected.scores)));
}

inline void expect_same_bits(const Selected& actual, const Selected& expected) {
  EXPECT_EQ(actual.lengths, expected.lengths);
  EXPECT_TRUE(ok(harness::compare_exactly("indices", actual.indices, expected.indices)));
  EXPECT_TRUE(same_bits(actual.scores, expected.scores));
}

inline void expect_close(const Indexer& ix, const IndexGradients& actual,
                         const IndexGradients& expected) {
  const harness::Limit limit = harness::gradient_limit(ix.dtype);
  EXPECT_TRUE(ok(compare("d_q", actual.d_q, expected.d_q, limit)));
  EXPECT_TRUE(ok(compare("d_weights", actual.d_weights, expected.d_weights, limit)));
  EXPECT_TRUE(ok(compare("d_k", actual.d_k, expected.d_k, limit)));
}

inline void expect_same_bits(const IndexGradients& actual, const IndexGradients& expected) {
  EXPECT_TRUE(same_bits(actual.d_q, expected.d_q));
  EXPECT_TRUE(same_bits(actual.d_weights, expected.d_weights));
  EXPECT_TRUE(same_bits(actual.d_k, expected.d_k));
}

/// Calls body(execution, shape) for every kernel and those shapes that it takes: an odd one, and
/// for backends with specialised kernels that of the models.
template <class Body>
void on_each_indexer(const Body& body) {
  on_each_kernel("index_topk", [&](const Execution& execution) {
    std::vector<Indexer> shapes = {{}, {.dtype = DType::f32}};
    if (execution.backend != Backend::reference) {
      shapes.push_back({.tokens = 5, .keys = 1500, .heads = 64, .dim = 128, .topk = 512});
      // More heads and channels than the general kernel of cuda takes at a time.
      for (const std::int64_t dim : {128, 264})
        shapes.push_back({.tokens = 9, .keys = 300, .heads = 161, .dim = dim, .topk = 40});
    }
    for (const Indexer& shape : shapes) {
      const IndexForwardWork work(filled(shape, 1), harness::device_of(execution.backend), false);
      if (!is_taken(work.args, execution)) continue;
      const ::testing::ScopedTrace trace(
          __FILE__, __LINE__,
          fmt::format("{}, {} heads, dim {}", name(shape.dtype), shape.heads, shape.dim));
      body(execution, shape);
    }
  });
}

}  // namespace winnow::tests
