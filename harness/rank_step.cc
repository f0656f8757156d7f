// SPDX-License-Identifier: Apache-2.0
#include "harness/rank_step.h"

#include <cstddef>
#include <numeric>
#include <utility>

namespace winnow::harness {
namespace {

/// `values` of the lines with these numbers.
Values at(std::vector<std::int32_t> lines, std::int64_t first, Values values) {
  return
      [lines = std::move(lines), first, values = std::move(values)](
          std::int64_t line, std::span<double> elements) { values(first + lines[line], elements); };
}

std::int64_t count(const std::vector<std::int32_t>& rows) {
  return static_cast<std::int64_t>(rows.size());
}

/// `rows` rows of a tensor from `first` on.
Tensor part(Tensor tensor, std::int64_t first, std::int64_t rows) {
  tensor.data =
      static_cast<std::byte*>(tensor.data) + first * tensor.stride[0] * element_bytes(tensor.dtype);
  tensor.shape[0] = rows;
  return tensor;
}

/// All elements of a contiguous tensor as one row; as none where it has no elements.
Tensor as_one_row(Tensor tensor, std::int64_t width) {
  const bool empty = tensor.shape[0] == 0;
  return winnow::tensor(tensor.data, tensor.dtype, {empty ? 0 : 1, width}, tensor.device);
}

std::int64_t elements_of(const Tensor& tensor) {
  std::int64_t elements = 1;
  for (std::int32_t i = 0; i < tensor.rank; ++i) elements *= tensor.shape[i];
  return elements;
}

std::int64_t total(const Shards& shards) {
  std::int64_t rows = 0;
  for (const auto& of_rank : shards.rows) rows += count(of_rank);
  return rows;
}

Rows wide(const std::vector<std::int32_t>& rows, std::int64_t first = 0) {
  Rows result;
  for (const std::int32_t row : rows) result.push_back(first + row);
  return result;
}

Batch with_queries(const Case& c, const Batch& batch, const std::vector<std::int32_t>& rows) {
  return {c, batch.offsets, batch.padded, rows};
}

/// 0, 1, ... n - 1
Rows spread(std::int64_t n) {
  Rows rows(static_cast<std::size_t>(n));
  std::iota(rows.begin(), rows.end(), 0);
  return rows;
}

/// What every query has for itself.
std::vector<StepOutput> results_of_rows(const TrainingStep& step) {
  std::vector<StepOutput> results;
  const auto add = [&](const char* what, const Buffer& buffer) {
    if (buffer.tensor()) results.push_back({what, &buffer});
  };
  add("window begins", step.begin);
  add("window ends", step.end);
  add("selection", step.selected);
  add("scores", step.scores);
  if (step.c.window > 0) add("index lists", step.indices);
  add("out", step.out);
  add("lse", step.lse);
  add("out_v", step.out_v);
  add("target", step.target);
  add("loss", step.loss);
  add("d_scores", step.d_scores);
  add("d_q", step.d_q);
  add("d_index_q", step.d_index_q);
  add("d_weights", step.d_weights);
  return results;
}

/// Sums over queries, where the case has them.
struct Sums {
  const Buffer *d_index_k, *d_kv, *d_kv_pools, *d_sink, *d_w_v;
};
void add_sums(const Case& c, const Sums& sums, std::vector<StepOutput>& results) {
  const RowKind index_keys = c.has_pools() ? RowKind::pools : RowKind::rows;
  results.push_back({"d_index_k", sums.d_index_k, index_keys});
  results.push_back({"d_kv", sums.d_kv, RowKind::rows});
  if (c.has_pools()) results.push_back({"d_kv of pools", sums.d_kv_pools, RowKind::pools, c.rows});
  if (c.sink) results.push_back({"d_sink", sums.d_sink, RowKind::parameters});
  if (c.head_dim > 0) results.push_back({"d_w_v", sums.d_w_v, RowKind::parameters});
}

}  // namespace

BatchShards::BatchShards(const Case& c, const Batch& batch, int ranks, Sharding sharding)
    : rows(shard_rows(batch.begins(), c.rows, ranks, sharding, c.ratio)) {
  pools.rows.resize(rows.rows.size());
  if (!c.has_pools()) return;
  std::vector<std::int32_t> pool_of_row(static_cast<std::size_t>(c.rows), -1);  // that ends there
  std::int32_t pool = 0;
  for (std::size_t d = 0; d + 1 < batch.offsets.size(); ++d) {
    const std::int32_t length = batch.offsets[d + 1] - batch.offsets[d];
    for (std::int32_t end = c.ratio; end <= length; end += c.ratio)
      pool_of_row[batch.begins()[d] + end - 1] = pool++;
  }
  for (std::size_t r = 0; r < rows.rows.size(); ++r)
    for (const std::int32_t row : rows.rows[r])
      if (pool_of_row[row] >= 0) pools.rows[r].push_back(pool_of_row[row]);
}

RankStep::RankStep(const Case& c, const Batch& batch, Sharding sharding, Communicator& ranks,
                   std::uint64_t seed, Device device)
    : communicator(ranks),
      shards(c, batch, ranks.size(), sharding),
      step(c, with_queries(c, batch, shards.rows.rows[ranks.rank()]),
           {.device = device, .rows = wide(shards.rows.rows[ranks.rank()])}, seed),
      own(c, {.device = device}, seed),
      index_k(own.input("index_k", c.dtype, {count(index_shards().rows[ranks.rank()]), c.index_dim},
                        at(index_shards().rows[ranks.rank()], 0, own.normal("index k")))),
      kv(own.input("kv", c.dtype, {count(shards.rows.rows[ranks.rank()]), c.qk_dim},
                   at(shards.rows.rows[ranks.rank()], 0, own.normal("kv")))),
      kv_pools(own.input("kv_pools", c.dtype, {count(shards.pools.rows[ranks.rank()]), c.qk_dim},
                         at(shards.pools.rows[ranks.rank()], c.rows, own.normal("kv")))),
      d_index_k(own.output("d_index_k", DType::f32, {index_k.tensor().shape[0], c.index_dim})),
      d_kv(own.output("d_kv", DType::f32, {kv.tensor().shape[0], c.qk_dim})),
      d_kv_pools(own.output("d_kv_pools", DType::f32, {kv_pools.tensor().shape[0], c.qk_dim})),
      d_sink(own.output("d_sink", DType::f32, {ranks.rank() == 0 ? c.heads : 0})),
      d_w_v(
          own.output("d_w_v", DType::f32, {ranks.rank() == 0 ? c.heads : 0, c.head_dim, c.v_dim})) {
  step.index_k.poison();
  step.kv.poison();
}

void RankStep::gather(const Execution& execution) {
  const std::int64_t pools = total(shards.pools);
  gather_keys(communicator, index_k.tensor(), part(step.index_k.tensor(), 0, total(index_shards())),
              index_shards(), execution);
  gather_keys(communicator, kv.tensor(), part(step.kv.tensor(), 0, step.c.rows), shards.rows,
              execution);
  if (step.c.has_pools()) {
    gather_keys(communicator, kv_pools.tensor(), part(step.kv.tensor(), step.c.rows, pools),
                shards.pools, execution);
  }
}

void RankStep::scatter_index_keys(const Execution& execution) {
  scatter_key_grads(communicator, part(step.d_index_k.tensor(), 0, total(index_shards())),
                    d_index_k.tensor(), index_shards(), execution);
}

void RankStep::scatter(const Execution& execution) {
  const std::int64_t pools = total(shards.pools);
  scatter_index_keys(execution);
  scatter_key_grads(communicator, part(step.d_kv.tensor(), 0, step.c.rows), d_kv.tensor(),
                    shards.rows, execution);
  if (step.c.has_pools()) {
    scatter_key_grads(communicator, part(step.d_kv.tensor(), step.c.rows, pools),
                      d_kv_pools.tensor(), shards.pools, execution);
  }
}

void RankStep::sum_parameters(const Execution& execution) {
  if (step.c.sink) sum_to_rank_0(step.d_sink, d_sink, execution);
  if (step.c.head_dim > 0) sum_to_rank_0(step.d_w_v, d_w_v, execution);
}

void RankStep::sum_to_rank_0(const Buffer& part, const Buffer& sum, const Execution& execution) {
  const std::int64_t width = elements_of(part.tensor());
  std::vector<std::int64_t> rows(static_cast<std::size_t>(communicator.size()), 0);
  rows[0] = 1;
  communicator.reduce_scatter(as_one_row(part.tensor(), width), as_one_row(sum.tensor(), width),
                              rows, execution);
}

std::vector<StepOutput> results_of(const RankStep& rank) {
  std::vector<StepOutput> results = results_of_rows(rank.step);
  add_sums(rank.step.c, {&rank.d_index_k, &rank.d_kv, &rank.d_kv_pools, &rank.d_sink, &rank.d_w_v},
           results);
  return results;
}

std::vector<StepOutput> results_alone(const TrainingStep& step) {
  std::vector<StepOutput> results = results_of_rows(step);
  add_sums(step.c, {&step.d_index_k, &step.d_kv, &step.d_kv, &step.d_sink, &step.d_w_v}, results);
  return results;
}

Rows rows_of_rank(const StepOutput& alone, const BatchShards& shards, int rank) {
  const auto r = static_cast<std::size_t>(rank);
  switch (alone.kind) {
    case RowKind::pools:
      return wide(shards.pools.rows[r], alone.first);
    case RowKind::parameters:
      return rank == 0 ? spread(alone.buffer->tensor().shape[0]) : Rows{};
    default:
      return wide(shards.rows.rows[r], alone.first);
  }
}

std::vector<double> values_of(const Buffer& buffer) {
  return values_of(buffer, spread(buffer.tensor().shape[0]));
}

std::vector<double> values_of(const Buffer& buffer, const Rows& rows) {
  if (buffer.tensor().dtype != DType::i32) return buffer.download(rows);
  const std::vector<std::int32_t> ints = buffer.download_ints(rows);
  return {ints.begin(), ints.end()};
}

Report compare_with_one_rank(const StepOutput& result, std::span<const double> of_ranks,
                             std::span<const double> alone) {
  if (result.bitwise()) return compare_exactly(result.what, of_ranks, alone);
  return compare(result.what, of_ranks, alone, gradient_limit(DType::f32));
}

}  // namespace winnow::harness
