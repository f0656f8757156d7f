// SPDX-License-Identifier: Apache-2.0
// Sparse attention, forward: two documents of 3 and 5 tokens in one batch; every token selects 2 of
// the keys that it may see and attends to them. In a model the indexer has its own small q and k;
// here it uses those of attention.
#include <cmath>
#include <cstdio>
#include <vector>

#include "winnow/winnow.h"

int main() {
  using winnow::tensor_of;
  constexpr int kTokens = 8, kHeads = 2, kDim = 64, kTopk = 2;
  std::vector<float> q(kTokens * kHeads * kDim), kv(kTokens * kDim), weights(kTokens * kHeads, 1);
  for (std::size_t i = 0; i < q.size(); ++i) q[i] = std::sin(0.1f * static_cast<float>(i));
  for (std::size_t i = 0; i < kv.size(); ++i) kv[i] = std::cos(0.3f * static_cast<float>(i));
  // Document i has the rows [cu_seqlens[i], cu_seqlens[i + 1]).
  std::vector<std::int32_t> cu_seqlens = {0, 3, 8};

  // Outputs are memory of the caller.
  std::vector<std::int32_t> begin(kTokens), end(kTokens), lengths(kTokens),
      indices(kTokens * kTopk);
  std::vector<float> out(q.size()), lse(kTokens * kHeads);
  const auto queries = tensor_of(q, {kTokens, kHeads, kDim});
  const auto keys = tensor_of(kv, {kTokens, kDim});
  const auto selected = tensor_of(indices, {kTokens, kTopk});
  const auto counts = tensor_of(lengths, {kTokens});

  winnow::key_windows({.cu_seqlens = tensor_of(cu_seqlens, {3}),
                       .begin = tensor_of(begin, {kTokens}),
                       .end = tensor_of(end, {kTokens})});
  winnow::index_topk_forward({.q = queries,
                              .k = keys,
                              .weights = tensor_of(weights, {kTokens, kHeads}),
                              .begin = tensor_of(begin, {kTokens}),
                              .end = tensor_of(end, {kTokens}),
                              .indices = selected,
                              .lengths = counts});
  winnow::sparse_attention_forward({.q = queries,
                                    .kv = keys,
                                    .indices = selected,
                                    .lengths = counts,
                                    .out = tensor_of(out, {kTokens, kHeads, kDim}),
                                    .lse = tensor_of(lse, {kTokens, kHeads})});

  for (int t = 0; t < kTokens; ++t) {
    std::printf("token %d sees keys [%d, %d), attends to %d of them, lse %.3f\n", t, begin[t],
                end[t], lengths[t], lse[t * kHeads]);
  }
  // A document's first token sees itself alone, so that its output is its own key.
  const bool right = lengths[3] == 1 && indices[3 * kTopk] == 3 && lengths[7] == 2 &&
                     std::abs(out[3 * kHeads * kDim] - kv[3 * kDim]) < 1e-6f;
  return right ? 0 : 1;
}
