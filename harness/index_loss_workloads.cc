// SPDX-License-Identifier: Apache-2.0
// Workloads of the ops that train the indexer: index_target, index_loss and dense_index_loss.
#include <cmath>
#include <limits>

#include "harness/index_loss.h"
#include "harness/random.h"

namespace winnow::harness {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// Of the keys of attention, those that stand for the given index keys.
std::vector<bool> attention_keys(const Case& c, const std::vector<bool>& index_keys) {
  std::vector<bool> keys(c.keys(), false);
  for (std::int64_t s = 0; s < c.index_keys(); ++s) keys[c.key_offset() + s] = index_keys[s];
  return keys;
}

/// index_loss does not know how many keys there are.
bool counts(const IndexLists& lists, std::int64_t t, std::int64_t j) {
  return lists.indices[t * lists.topk + j] >= 0 && (lists.lengths.empty() || j < lists.lengths[t]);
}

/// In slots that do not count: NaN or -inf. With holes, some that would count have no score either.
Values score_values(const Case& c, const Buffers& buffers, const IndexLists& lists,
                    std::uint64_t seed) {
  return [&lists, values = buffers.normal("scores", 2), random = Random(seed, "no score"),
          holes = c.holes](std::int64_t t, std::span<double> elements) {
    values(t, elements);
    for (std::size_t j = 0; j < elements.size(); ++j) {
      const std::int64_t draw = random.below(t * lists.topk + static_cast<std::int64_t>(j), 16);
      if (!counts(lists, t, static_cast<std::int64_t>(j)))
        elements[j] = draw % 2 == 0 ? kNan : -kInfinity;
      else if (holes && draw == 0)
        elements[j] = -kInfinity;
    }
  };
}

/// Positive, and no target at all in every seventh row.
Values target_values(const IndexLists& lists, std::uint64_t seed) {
  return [&lists, random = Random(seed, "target")](std::int64_t t, std::span<double> elements) {
    for (std::size_t j = 0; j < elements.size(); ++j) {
      elements[j] = t % 7 == 3 ? 0 : random.uniform(t * lists.topk + static_cast<std::int64_t>(j));
      if (!counts(lists, t, static_cast<std::int64_t>(j))) elements[j] = kNan;
    }
  };
}

Values constant(double value) {
  return [value](std::int64_t, std::span<double> elements) {
    for (double& element : elements) element = value;
  };
}

}  // namespace

IndexTargetWork::IndexTargetWork(const Case& c, const Placement& placement, std::uint64_t seed)
    : lists(index_lists(c, seed, c.tokens, c.index_keys(), c.index_topk())),
      flops(2.0 * lists.valid_slots() * c.heads * c.qk_dim),
      buffers(c, placement, seed),
      q(buffers.query_input("q", c.dtype, {c.heads, c.qk_dim}, buffers.normal("q"))),
      kv(buffers.input(
          "kv", c.dtype, {c.keys(), c.qk_dim},
          nan_unless(attention_keys(c, lists.used(0, c.tokens)), 1, buffers.normal("kv")))),
      indices(buffers.query_ints("indices", {c.index_topk()}, lists.indices)),
      lengths(c.lengths ? buffers.query_ints("lengths", {}, lists.lengths) : buffers.absent()),
      sink(buffers.sink(c)),
      lse(buffers.query_input("lse", DType::f32, {c.heads}, constant(10))),
      target(buffers.query_output("target", DType::f32, {c.index_topk()})),
      args(buffers.arguments<IndexTarget>()) {
  args.scale = c.attention_scale();
  args.key_offset = c.key_offset();
}

std::vector<Call> IndexTargetWork::calls() const { return {call(args, flops)}; }

IndexLossWork::IndexLossWork(const Case& c, const Placement& placement, std::uint64_t seed)
    : lists(index_lists(c, seed, c.tokens, c.index_keys(), c.index_topk())),
      buffers(c, placement, seed),
      indices(buffers.query_ints("indices", {c.index_topk()}, lists.indices)),
      lengths(c.lengths ? buffers.query_ints("lengths", {}, lists.lengths) : buffers.absent()),
      scores(buffers.query_input("scores", DType::f32, {c.index_topk()},
                                 score_values(c, buffers, lists, seed))),
      target(
          buffers.query_input("target", DType::f32, {c.index_topk()}, target_values(lists, seed))),
      loss(buffers.query_output("loss", DType::f32, {})),
      d_scores(buffers.query_output("d_scores", DType::f32, {c.index_topk()})),
      args(buffers.arguments<IndexLoss>()) {}

std::vector<Call> IndexLossWork::calls() const { return {call(args)}; }

DenseIndexLossWork::DenseIndexLossWork(const Case& c, const Placement& placement,
                                       std::uint64_t seed)
    : windows(windows_of(c, seed, c.ratio)),
      forward_flops(2.0 * windows.total() * (c.heads * c.qk_dim + c.index_heads * c.index_dim)),
      backward_flops(2.0 * windows.total() *
                     (c.heads * c.qk_dim + 3 * c.index_heads * c.index_dim)),
      buffers(c, placement, seed),
      q(buffers.query_input("q", c.dtype, {c.heads, c.qk_dim}, buffers.normal("q"))),
      kv(buffers.input(
          "kv", c.dtype, {c.keys(), c.qk_dim},
          nan_unless(attention_keys(c, windows.seen(c.index_keys())), 1, buffers.normal("kv")))),
      sink(buffers.sink(c)),
      index_q(buffers.query_input("index_q", c.dtype, {c.index_heads, c.index_dim},
                                  buffers.normal("index q"))),
      index_k(
          buffers.input("index_k", c.dtype, {c.index_keys(), c.index_dim},
                        nan_unless(windows.seen(c.index_keys()), 1, buffers.normal("index k")))),
      weights(buffers.query_input(
          "weights", DType::f32, {c.index_heads},
          buffers.normal("index weights",
                         3 / std::sqrt(static_cast<double>(c.index_heads * c.index_dim))))),
      begin(buffers.query_ints("begin", {}, windows.begin)),
      end(buffers.query_ints("end", {}, windows.end)),
      loss(buffers.query_output("loss", DType::f32, {})),
      lse(buffers.query_output("lse", DType::f32, {c.heads})),
      d_loss(buffers.query_input("d_loss", DType::f32, {},
                                 buffers.if_live(1, buffers.normal("d_loss")))),
      d_index_q(buffers.query_output("d_index_q", c.dtype, {c.index_heads, c.index_dim})),
      d_weights(buffers.query_output("d_weights", DType::f32, {c.index_heads})),
      d_index_k(buffers.sum("d_index_k", {c.index_keys(), c.index_dim})),
      d_index_k_rounded(c.dtype == DType::f32 ? buffers.absent()
                                              : buffers.output("d_index_k_rounded", c.dtype,
                                                               {c.index_keys(), c.index_dim})),
      forward(buffers.arguments<DenseIndexLossForward>()),
      backward(buffers.arguments<DenseIndexLossBackward>()) {
  forward.scale = backward.scale = c.attention_scale();
  forward.key_offset = backward.key_offset = c.key_offset();
  forward_given = forward;
  forward_given.lse_given = true;
  backward_rounded = backward;
  backward_rounded.d_index_k = d_index_k_rounded.tensor();
}

std::vector<Call> DenseIndexLossWork::calls() const {
  std::vector<Call> calls{call(forward, forward_flops), call(forward_given, forward_flops),
                          call(backward, backward_flops)};
  calls[1].name += ", lse given";
  return calls;
}

}  // namespace winnow::harness
