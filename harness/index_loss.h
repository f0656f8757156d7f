// SPDX-License-Identifier: Apache-2.0
// The ops that train the indexer: index_target, index_loss and dense_index_loss. Their memory,
// their calls and their checks.
#pragma once

#include <cstdint>
#include <vector>

#include "harness/buffers.h"
#include "harness/calls.h"
#include "harness/compare.h"
#include "harness/inputs.h"

namespace winnow::harness {

struct IndexTargetWork {
  /// `lse` is a placeholder until the right one is uploaded.
  IndexTargetWork(const Case& c, const Placement& placement, std::uint64_t seed);
  std::vector<Call> calls() const;

  IndexLists lists;  // of the whole case, ids of index keys
  double flops;
  Buffers buffers;
  Buffer &q, &kv, &indices, &lengths, &sink, &lse, &target;
  IndexTarget args;
};

std::vector<Report> check_index_target(const Case& c, const Execution& execution,
                                       std::uint64_t seed);

struct IndexLossWork {
  IndexLossWork(const Case& c, const Placement& placement, std::uint64_t seed);
  std::vector<Call> calls() const;

  IndexLists lists;  // of the whole case
  Buffers buffers;
  Buffer &indices, &lengths, &scores, &target, &loss, &d_scores;
  IndexLoss args;
};

std::vector<Report> check_index_loss(const Case& c, const Execution& execution, std::uint64_t seed);

struct DenseIndexLossWork {
  DenseIndexLossWork(const Case& c, const Placement& placement, std::uint64_t seed);
  std::vector<Call> calls() const;

  Windows windows;  // of the whole case
  double forward_flops, backward_flops;
  Buffers buffers;
  Buffer &q, &kv, &sink, &index_q, &index_k, &weights, &begin, &end, &loss, &lse;
  Buffer &d_loss, &d_index_q, &d_weights, &d_index_k, &d_index_k_rounded;
  DenseIndexLossForward forward;
  DenseIndexLossForward forward_given;      // reads the lse of forward
  DenseIndexLossBackward backward;          // d_index_k is f32, added to
  DenseIndexLossBackward backward_rounded;  // d_index_k has the type of index_k; absent for f32
};

std::vector<Report> check_dense_index_loss(const Case& c, const Execution& execution,
                                           std::uint64_t seed);

}  // namespace winnow::harness
