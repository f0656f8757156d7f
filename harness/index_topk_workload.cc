// SPDX-License-Identifier: Apache-2.0
// The workload of index_topk: selection, replay, and backward from both.
#include <algorithm>
#include <cmath>
#include <limits>

#include "harness/index_topk.h"
#include "harness/numbers.h"
#include "harness/random.h"
#include "harness/score_pattern.h"

namespace winnow::harness {
namespace {

constexpr double kFp8Factor = 64;  // puts normal numbers into the middle of e4m3's range

std::vector<bool> readable_keys(const Case& c, const Windows& windows) {
  std::vector<bool> readable = windows.seen(c.index_keys());
  for (std::int64_t s = 0; s < c.index_keys(); ++s)
    if (holds_nan(c, s)) readable[s] = false;
  return readable;
}

/// How many keys of each window can be selected.
std::vector<std::int64_t> candidates(const Case& c, const Windows& windows) {
  std::vector<std::int64_t> counts(c.tokens, 0);
  for (std::int64_t t = 0; t < c.tokens; ++t) {
    counts[t] = windows.length(t);
    for (std::int64_t s = windows.begin[t]; has_nan_keys(c) && s < windows.end[t]; ++s)
      if (holds_nan(c, s)) --counts[t];
  }
  return counts;
}

/// Keys without their scale, whichever type holds it.
Values unscaled_keys(const Case& c, const Buffers& buffers, bool fp8) {
  if (c.exact_scores) return buffers.whole_numbers("index k", 2);
  return patterned_keys(c, buffers.normal("index k", fp8 ? kFp8Factor : 1));
}

Values query_values(const Case& c, const Buffers& buffers, bool fp8) {
  if (c.exact_scores) return buffers.whole_numbers("index q", 2);
  return patterned_queries(c, buffers.normal("index q", fp8 ? kFp8Factor : 1),
                           unscaled_keys(c, buffers, fp8));
}

/// The stored k; for the oracle of fp8 what it stands for.
Values key_values(const Case& c, const Buffers& buffers, const Windows& windows,
                  const Values& scale, bool fp8) {
  Values stored = unscaled_keys(c, buffers, fp8);
  if (!fp8) {
    stored = [c, stored](std::int64_t line, std::span<double> elements) {
      stored(line, elements);
      for (double& element : elements) element *= key_factor(c, line);
    };
  } else if (buffers.as_f64()) {
    stored = [stored, scale](std::int64_t line, std::span<double> elements) {
      double factor = 0;
      scale(line, {&factor, 1});
      stored(line, elements);
      for (double& element : elements)
        element = rounded(DType::f8_e4m3, element) * rounded(DType::f32, factor);
    };
  }
  return nan_unless(readable_keys(c, windows), 1, stored);
}

Values scale_values(const Case& c, std::uint64_t seed) {
  return
      [random = Random(seed, "index k_scale"), c](std::int64_t line, std::span<double> elements) {
        // Keys that are the same have the same scale.
        const std::int64_t twin = twin_of(c, line);
        elements[0] =
            c.exact_scores
                ? 1
                : key_factor(c, line) * (0.5 + random.uniform(twin < 0 ? line : twin)) / kFp8Factor;
      };
}

Values weight_values(const Case& c, const Buffers& buffers, bool fp8) {
  if (c.exact_scores) return buffers.whole_numbers("index weights", 3);
  const double factor = 1 / std::sqrt(static_cast<double>(c.index_heads * c.index_dim));
  return patterned_weights(c, buffers.normal("index weights", fp8 ? factor / kFp8Factor : factor));
}

/// `values` in slots for which `counts(t, j)`, NaN in others.
template <class Counts>
Values in_slots(Counts counts, Values values) {
  return [counts, values = std::move(values)](std::int64_t line, std::span<double> elements) {
    values(line, elements);
    for (std::size_t j = 0; j < elements.size(); ++j)
      if (!counts(line, static_cast<std::int64_t>(j)))
        elements[j] = std::numeric_limits<double>::quiet_NaN();
  };
}

}  // namespace

IndexTopkWork::IndexTopkWork(const Case& c, const Placement& placement, std::uint64_t seed,
                             bool fp8)
    : windows(windows_of(c, seed, c.ratio)),
      replay_lists(index_lists(c, seed, c.tokens, c.index_keys(), c.index_topk())),
      forward_flops(2.0 * c.index_heads * c.index_dim * windows.total()),
      backward_flops(0),
      buffers(c, placement, seed),
      q(buffers.query_input("q", fp8 ? DType::f8_e4m3 : c.dtype, {c.index_heads, c.index_dim},
                            query_values(c, buffers, fp8))),
      // The oracle's k of fp8 is a product of two rounded numbers, which is not rounded again.
      k(buffers.input("k", fp8 ? (buffers.as_f64() ? DType::f64 : DType::f8_e4m3) : c.dtype,
                      {c.index_keys(), c.index_dim},
                      key_values(c, buffers, windows, scale_values(c, seed), fp8))),
      weights(buffers.query_input("weights", DType::f32, {c.index_heads},
                                  weight_values(c, buffers, fp8))),
      k_scale(fp8 && !buffers.as_f64()
                  ? buffers.input("k_scale", DType::f32, {c.index_keys()},
                                  nan_unless(readable_keys(c, windows), 1, scale_values(c, seed)))
                  : buffers.absent()),
      begin(buffers.query_ints("begin", {}, windows.begin)),
      end(buffers.query_ints("end", {}, windows.end)),
      indices(buffers.query_output("indices", DType::i32, {c.index_topk()})),
      lengths(buffers.query_output("lengths", DType::i32, {})),
      scores(c.index_scores ? buffers.query_output("scores", DType::f32, {c.index_topk()})
                            : buffers.absent()),
      d_scores(buffers.query_input(
          "d_scores", DType::f32, {c.index_topk()},
          in_slots([counts = candidates(c, windows)](std::int64_t t,
                                                     std::int64_t j) { return j < counts[t]; },
                   buffers.if_live(1, buffers.normal("d_scores"))))),
      replay_indices(buffers.query_ints("replay_indices", {c.index_topk()}, replay_lists.indices)),
      replay_lengths(c.lengths ? buffers.query_ints("replay_lengths", {}, replay_lists.lengths)
                               : buffers.absent()),
      replay_scores(buffers.query_output("replay_scores", DType::f32, {c.index_topk()})),
      replay_d_scores(buffers.query_input(
          "replay_d_scores", DType::f32, {c.index_topk()},
          in_slots([this](std::int64_t t, std::int64_t j) { return replayed(t, j); },
                   buffers.if_live(1, buffers.normal("replay d_scores"))))),
      d_q(buffers.query_output("d_q", c.dtype, {c.index_heads, c.index_dim})),
      d_weights(buffers.query_output("d_weights", DType::f32, {c.index_heads})),
      d_k(buffers.sum("d_k", {c.index_keys(), c.index_dim})),
      d_k_rounded(c.dtype == DType::f32
                      ? buffers.absent()
                      : buffers.output("d_k_rounded", c.dtype, {c.index_keys(), c.index_dim})),
      forward(buffers.arguments<IndexTopkForward>()),
      replay(forward),
      backward(buffers.arguments<IndexTopkBackward>()),
      replay_backward(backward) {
  for (std::int64_t t = 0; t < c.tokens; ++t)
    backward_flops +=
        6.0 * c.index_heads * c.index_dim * std::min(windows.length(t), c.index_topk());
  replay.indices = replay_indices.tensor();
  replay.lengths = replay_lengths.tensor();
  replay.scores = replay_scores.tensor();
  replay.replay = true;
  replay_backward.indices = replay_indices.tensor();
  replay_backward.lengths = replay_lengths.tensor();
  replay_backward.d_scores = replay_d_scores.tensor();
  if (d_k_rounded.tensor()) replay_backward.d_k = d_k_rounded.tensor();
}

bool IndexTopkWork::replayed(std::int64_t t, std::int64_t j) const {
  const std::int32_t key = replay_lists.indices[t * replay_lists.topk + j];
  return replay_lists.valid(t, j) && key >= windows.begin[t] && key < windows.end[t];
}

std::vector<Call> IndexTopkWorks::calls() const {
  std::vector<Call> calls{call(plain.forward, plain.forward_flops),
                          call(plain.backward, plain.backward_flops),
                          call(fp8.forward, fp8.forward_flops)};
  calls.back().name += ", fp8";
  return calls;
}

}  // namespace winnow::harness
