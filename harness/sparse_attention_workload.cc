// SPDX-License-Identifier: Apache-2.0
// The workload of sparse_attention.
#include <algorithm>
#include <limits>

#include "harness/sparse_attention.h"

namespace winnow::harness {
namespace {

// Without a mean of values and gradients the terms of d_sink would cancel, and no relative bound
// could hold.
constexpr double kMean = 0.25;

std::int64_t slices(const Case& c) { return std::max<std::int64_t>(c.batch, 1); }

Shape key_shape(const Case& c) {
  return c.batch > 0 ? Shape{c.batch, c.keys(), c.qk_dim} : Shape{c.keys(), c.qk_dim};
}

std::vector<bool> used_keys(const Case& c, const IndexLists& lists) {
  std::vector<bool> used;
  for (std::int64_t slice = 0; slice < slices(c); ++slice) {
    const std::vector<bool> here = lists.used(slice * c.tokens, (slice + 1) * c.tokens);
    used.insert(used.end(), here.begin(), here.end());
  }
  return used;
}

std::vector<bool> rows_with_keys(const IndexLists& lists, std::int64_t rows) {
  std::vector<bool> result(rows);
  for (std::int64_t t = 0; t < rows; ++t) result[t] = lists.has_keys(t);
  return result;
}

}  // namespace

SparseAttentionWork::SparseAttentionWork(const Case& c, const Placement& placement,
                                         std::uint64_t seed)
    : lists(index_lists(c, seed, slices(c) * c.tokens, c.keys(), c.topk)),
      forward_flops(2.0 * lists.valid_slots() * c.heads * (c.qk_dim + c.v_dim)),
      backward_flops(2.0 * lists.valid_slots() * c.heads * (3 * c.qk_dim + 2 * c.v_dim)),
      buffers(c, placement, seed, c.batch),
      q(buffers.query_input("q", c.dtype, {c.heads, c.qk_dim}, buffers.normal("q"))),
      kv(buffers.input("kv", c.dtype, key_shape(c),
                       nan_unless(used_keys(c, lists), 1, buffers.normal("kv", 1, kMean)))),
      indices(buffers.query_ints("indices", {c.topk}, lists.indices)),
      lengths(c.lengths ? buffers.query_ints("lengths", {}, lists.lengths) : buffers.absent()),
      sink(buffers.sink(c)),
      out(buffers.query_output("out", c.dtype, {c.heads, c.v_dim})),
      lse(buffers.query_output("lse", DType::f32, {c.heads})),
      max_logits(c.extras ? buffers.query_output("max_logits", DType::f32, {c.heads})
                          : buffers.absent()),
      d_out(buffers.query_input(
          "d_out", c.dtype, {c.heads, c.v_dim},
          nan_unless(rows_with_keys(lists, slices(c) * c.tokens), c.heads,
                     buffers.if_live(c.heads, buffers.normal("d_out", 1, kMean))))),
      d_lse(c.extras
                ? buffers.query_input("d_lse", DType::f32, {c.heads},
                                      nan_unless(rows_with_keys(lists, slices(c) * c.tokens), 1,
                                                 buffers.if_live(1, buffers.normal("d_lse"))))
                : buffers.absent()),
      d_q(buffers.query_output("d_q", c.dtype, {c.heads, c.qk_dim})),
      d_kv(buffers.sum("d_kv", key_shape(c))),
      d_kv_rounded(c.dtype == DType::f32 ? buffers.absent()
                                         : buffers.output("d_kv_rounded", c.dtype, key_shape(c))),
      d_sink(c.sink ? buffers.sum("d_sink", {c.heads}) : buffers.absent()),
      forward(buffers.arguments<SparseAttentionForward>()),
      backward(buffers.arguments<SparseAttentionBackward>()) {
  forward.scale = backward.scale = c.scale;
  backward_rounded = backward;
  backward_rounded.d_kv = d_kv_rounded.tensor();
  backward_rounded.max_heads_per_pass = static_cast<std::int32_t>(c.heads + 1) / 2;
}

std::vector<Call> SparseAttentionWork::calls() const {
  return {call(forward, forward_flops), call(backward, backward_flops)};
}

}  // namespace winnow::harness
