// SPDX-License-Identifier: Apache-2.0
// TrainingStep: the calls of one training step of sparse attention on a packed batch, in order.
#pragma once

#include <cstdint>
#include <vector>

#include "harness/buffers.h"

namespace winnow::harness {

/// Where a query row stands in the packed batch.
struct QueryPlace {
  std::int64_t position = 0;    // in its document; -1: padding
  std::int64_t index_keys = 0;  // that it may see: rows, or pools of them
};

/// Documents in c.rows rows, and which of the rows are queries.
struct Batch {
  /// Four uneven documents; c.tokens of the rows, evenly spread, are queries.
  explicit Batch(const Case& c);
  /// The given documents and queries; `query_rows` empty: all rows.
  Batch(const Case& c, std::vector<std::int32_t> offsets, std::vector<std::int32_t> padded,
        std::vector<std::int32_t> query_rows);

  /// Where documents begin in the rows.
  const std::vector<std::int32_t>& begins() const { return padded.empty() ? offsets : padded; }

  std::vector<std::int32_t> offsets;     // of the documents' real rows
  std::vector<std::int32_t> padded;      // of the documents with their padding; empty: the same
  std::vector<std::int32_t> query_rows;  // empty: all
  std::vector<QueryPlace> places;        // of the queries
};

/// Each call reads what calls before it wrote, as in training. Gradients of keys are fp32 sums.
struct TrainingStep {
  /// The case is one of a model's geometry.
  TrainingStep(const Case& c, Device device, std::uint64_t seed)
      : TrainingStep(c, Batch(c), {.device = device}, seed) {}
  /// Query tensors hold the rows of the placement, which are the queries of the batch.
  TrainingStep(const Case& c, const Batch& batch, const Placement& placement, std::uint64_t seed);
  TrainingStep(const TrainingStep&) = delete;

  /// The sums that backward calls add to become 0.
  void clear_sums();
  /// visit(arguments, flops) for each call, in order.
  template <class Visitor>
  void visit_calls(const Visitor& visit) const;
  void run(const Execution& execution) const;

  Case c;
  Batch batch;
  Buffers buffers;
  Buffer &cu_seqlens, &cu_seqlens_padded, &query_rows, &begin, &end;
  Buffer &index_q, &index_k, &weights, &selected, &selected_lengths, &scores;
  Buffer &indices, &lengths;  // of attention; those selected, where there is no window
  Buffer &q, &kv, &sink, &out, &lse;
  Buffer &w_v, &out_v, &d_out_v;  // absent without a value projection
  Buffer &target, &loss, &d_scores;
  Buffer &d_out, &d_q, &d_kv, &d_sink, &d_w_v;
  Buffer &d_index_q, &d_index_k, &d_weights;

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

 private:
  /// Of all calls of an op.
  struct Flops {
    double select, attend, project, target, project_backward, attend_backward, select_backward;
  };
  Flops flops() const;
};

template <class Visitor>
void TrainingStep::visit_calls(const Visitor& visit) const {
  const Flops each = flops();
  visit(windows, 0.0);
  visit(select, each.select);
  if (c.window > 0) visit(lists, 0.0);
  visit(attend, each.attend);
  if (c.head_dim > 0) visit(project, each.project);
  visit(find_target, each.target);
  visit(find_loss, 0.0);
  if (c.head_dim > 0) visit(project_backward, each.project_backward);
  visit(attend_backward, each.attend_backward);
  visit(select_backward, each.select_backward);
}

/// What calls per query row cost at most, to decide how many rows a backend can be given.
double flops_per_row(const Case& c);

}  // namespace winnow::harness
