// SPDX-License-Identifier: Apache-2.0
// Sparse attention on one packed batch over the ranks of an MPI job: mpirun -n 4 context_parallel
// Each rank computes the queries and keys of its own rows, gathers the keys of all ranks, attends,
// and receives the gradients of its own keys, summed over ranks.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <exception>
#include <vector>

#include <mpi.h>

#include "winnow/mpi.h"
#include "winnow/winnow.h"

namespace {

using winnow::tensor_of;

constexpr int kTokens = 96, kHeads = 4, kDim = 64, kTopk = 8;

/// Whether every row selected as many keys as it may.
bool run() {
  const MPI_Comm world = MPI_COMM_WORLD;
  const auto ranks = winnow::mpi_communicator(&world);

  // Two documents of 66 and 30 tokens. Zigzag shards balance the causal work over the ranks.
  std::vector<std::int32_t> cu_seqlens = {0, 66, 96};
  winnow::Shards shards =
      winnow::shard_rows(cu_seqlens, kTokens, ranks->size(), winnow::Sharding::zigzag);
  std::vector<std::int32_t>& rows = shards.rows[ranks->rank()];
  const auto own = static_cast<std::int64_t>(rows.size());

  // Synthetic values in place of a layer's projections of the rows of this rank.
  std::vector<float> q(own * kHeads * kDim), kv(own * kDim), weights(own * kHeads, 1.0f);
  for (std::int64_t i = 0; i < own * kHeads * kDim; ++i)
    q[i] = std::sin(0.1f * static_cast<float>(rows[i / (kHeads * kDim)] + i % (kHeads * kDim)));
  for (std::int64_t i = 0; i < own * kDim; ++i)
    kv[i] = std::cos(0.3f * static_cast<float>(rows[i / kDim] + i % kDim));

  // The keys of all ranks in global order. To be short, the indexer uses the keys of attention.
  std::vector<float> all_kv(kTokens * kDim);
  const auto keys = tensor_of(all_kv, {kTokens, kDim});
  winnow::gather_keys(*ranks, tensor_of(kv, {own, kDim}), keys, shards);

  // The operators are called as on a single rank; only key_windows gets the global rows.
  std::vector<std::int32_t> begin(own), end(own), indices(own * kTopk), lengths(own);
  std::vector<float> out(q.size()), lse(own * kHeads), d_q(q.size()), d_kv(own * kDim);
  const auto queries = tensor_of(q, {own, kHeads, kDim});
  const auto begins = tensor_of(begin, {own}), ends = tensor_of(end, {own});
  const auto lists = tensor_of(indices, {own, kTopk});
  const auto counts = tensor_of(lengths, {own});
  const auto outs = tensor_of(out, {own, kHeads, kDim});
  const auto lses = tensor_of(lse, {own, kHeads});
  winnow::key_windows({.cu_seqlens = tensor_of(cu_seqlens, {3}),
                       .query_rows = tensor_of(rows, {own}),
                       .begin = begins,
                       .end = ends});
  winnow::index_topk_forward({.q = queries,
                              .k = keys,
                              .weights = tensor_of(weights, {own, kHeads}),
                              .begin = begins,
                              .end = ends,
                              .indices = lists,
                              .lengths = counts});
  winnow::sparse_attention_forward(
      {.q = queries, .kv = keys, .indices = lists, .lengths = counts, .out = outs, .lse = lses});

  // Backward of sum(out^2) / 2: gradients of all keys from local queries, then summed over ranks.
  std::vector<float> all_d_kv(kTokens * kDim, 0.0f);
  const auto all_sums = tensor_of(all_d_kv, {kTokens, kDim});
  winnow::sparse_attention_backward({.q = queries,
                                     .kv = keys,
                                     .indices = lists,
                                     .lengths = counts,
                                     .out = outs,
                                     .lse = lses,
                                     .d_out = outs,
                                     .d_q = tensor_of(d_q, {own, kHeads, kDim}),
                                     .d_kv = all_sums});
  winnow::scatter_key_grads(*ranks, all_sums, tensor_of(d_kv, {own, kDim}), shards);

  std::int64_t seen = 0;
  bool right = true;
  for (std::int64_t t = 0; t < own; ++t) {
    seen += end[t] - begin[t];
    right = right && lengths[t] == std::min(kTopk, end[t] - begin[t]);
  }
  double sum = 0;  // a rank may have no rows
  for (const float value : d_kv) sum += std::abs(value);
  std::printf("rank %d of %d: %d rows see %d keys; the sum of |d_kv| is %.6f\n", ranks->rank(),
              ranks->size(), static_cast<int>(own), static_cast<int>(seen), sum);
  return right && std::isfinite(sum);
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  bool right = false;
  try {
    right = run();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    MPI_Abort(MPI_COMM_WORLD, 1);  // else the other ranks would wait for this one
  }
  MPI_Finalize();
  return right ? 0 : 1;
}
