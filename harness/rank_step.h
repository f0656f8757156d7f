// SPDX-License-Identifier: Apache-2.0
// RankStep: the part of one rank in a training step over many ranks, and what of it must equal a
// step of one rank.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "harness/compare.h"
#include "harness/training_step.h"
#include "winnow/parallel.h"

namespace winnow::harness {

/// Rows of a packed batch and the pools made of them, cut into shards. A pool belongs to the rank
/// that holds its last row.
struct BatchShards {
  BatchShards(const Case& c, const Batch& batch, int ranks, Sharding sharding);

  Shards rows;
  Shards pools;  // without any where the case has none
};

/// Its queries are the rows of its shard; it holds the keys of those rows and gets the others from
/// their ranks. What single rows get stays on their rank; gradients of keys are summed over ranks
/// and go back to the rank that holds the key. Sums of parameters' gradients, which training makes
/// for all of its layers at once, go to rank 0.
struct RankStep {
  RankStep(const Case& c, const Batch& batch, Sharding sharding, Communicator& communicator,
           std::uint64_t seed, Device device = {});
  RankStep(const RankStep&) = delete;

  void gather(const Execution& execution);
  void compute(const Execution& execution) const { step.run(execution); }
  void scatter(const Execution& execution);
  void scatter_index_keys(const Execution& execution);  // a part of scatter
  void sum_parameters(const Execution& execution);

  Communicator& communicator;
  BatchShards shards;
  TrainingStep step;  // its keys are poison until they are gathered
  Buffers own;
  Buffer &index_k, &kv, &kv_pools;
  Buffer &d_index_k, &d_kv, &d_kv_pools;  // f32
  Buffer &d_sink, &d_w_v;                 // f32; without rows but on rank 0

 private:
  const Shards& index_shards() const { return step.c.has_pools() ? shards.pools : shards.rows; }
  void sum_to_rank_0(const Buffer& part, const Buffer& sum, const Execution& execution);
};

/// What the rows of a tensor are.
enum class RowKind : std::int32_t { queries, rows, pools, parameters };

/// A tensor that a step writes.
struct StepOutput {
  std::string what;
  const Buffer* buffer = nullptr;
  RowKind kind = RowKind::queries;
  std::int64_t first = 0;  // row 0 of a step alone, where it holds more in front

  /// What is a function of single rows is the same bits on every rank; sums over rows are within
  /// the error of fp32 sums in another order.
  bool bitwise() const { return kind == RowKind::queries; }
};
/// The same list for a rank's step and for a step alone.
std::vector<StepOutput> results_of(const RankStep& rank);
std::vector<StepOutput> results_alone(const TrainingStep& step);
/// Rows of a result of a step alone that a rank holds.
Rows rows_of_rank(const StepOutput& alone, const BatchShards& shards, int rank);

/// Elements of any type, of all rows or of those given.
std::vector<double> values_of(const Buffer& buffer);
std::vector<double> values_of(const Buffer& buffer, const Rows& rows);

/// Values of ranks against those of a step alone.
Report compare_with_one_rank(const StepOutput& result, std::span<const double> of_ranks,
                             std::span<const double> alone);

}  // namespace winnow::harness
