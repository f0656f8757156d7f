// SPDX-License-Identifier: Apache-2.0
// TrainingStep: the calls of one training step of sparse attention on a packed batch, in order.
#pragma once

#include <cstdint>
#include <vector>

#include "harness/workload.h"
#include "tools/calls.h"

namespace winnow::tools {

/// Where a query row stands in the packed batch.
struct QueryPlace {
  std::int64_t position = 0;    // in its document
  std::int64_t index_keys = 0;  // that it may see: rows, or pools of them
};

/// Four uneven documents in c.rows rows; c.tokens of the rows, evenly spread, are queries.
struct Batch {
  explicit Batch(const harness::Case& c);

  std::vector<std::int32_t> offsets;     // of the documents
  std::vector<std::int32_t> query_rows;  // empty: all
  std::vector<QueryPlace> places;        // of the queries
};

/// Each call reads what calls before it wrote, as in training. Gradients of keys are fp32 sums.
struct TrainingStep {
  /// The case is one of a model's geometry.
  TrainingStep(const harness::Case& c, Device device, std::uint64_t seed);
  TrainingStep(const TrainingStep&) = delete;

  /// The sums that backward calls add to become 0.
  void clear_sums();
  std::vector<Call> calls() const;

  harness::Case c;
  Batch batch;
  harness::Buffers buffers;
  harness::Buffer &cu_seqlens, &query_rows, &begin, &end;
  harness::Buffer &index_q, &index_k, &weights, &selected, &selected_lengths, &scores;
  harness::Buffer &indices, &lengths;  // of attention; those selected, where there is no window
  harness::Buffer &q, &kv, &sink, &out, &lse;
  harness::Buffer &w_v, &out_v, &d_out_v;  // absent without a value projection
  harness::Buffer &target, &loss, &d_scores;
  harness::Buffer &d_out, &d_q, &d_kv, &d_sink, &d_w_v;
  harness::Buffer &d_index_q, &d_index_k, &d_weights;

  KeyWindows windows;
  IndexTopkForward select;
  WindowIndices lists;  // where the case has a window
  SparseAttentionForward attend;
  ValueProjectionForward project;  // where the case has a value projection
  IndexTarget find_target;
  IndexLoss find_loss;
  ValueProjectionBackward project_backward;
  SparseAttentionBackward attend_backward;
  IndexTopkBackward select_backward;
};

/// What calls per query row cost at most, to decide how many rows a backend can be given.
double flops_per_row(const harness::Case& c);

}  // namespace winnow::tools
