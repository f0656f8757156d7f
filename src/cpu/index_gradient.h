// SPDX-License-Identifier: Apache-2.0
// The gradients of the indexer's scores, for index_topk and for dense_index_loss.
#pragma once

#include <cstddef>
#include <cstdint>

#include "winnow/index_topk.h"

namespace winnow::cpu {

/// How a call of index_gradient goes about it, within the limit of `execution`.
struct IndexGradientPlan {
  IndexGradientPlan(const IndexTopkBackward& args, const Execution& execution);

  std::int64_t heads, dim, topk;
  std::int64_t row_stride;   // of widened rows of `dim`
  std::int64_t head_stride;  // of rows of `heads`
  std::int64_t sign_bytes;   // of one slot
  int range_shift;           // a range has 2^range_shift keys
  std::int64_t ranges;
  std::int64_t chunk_rows;  // query rows for which notes are kept at a time
  std::size_t note_bytes;   // of one query row
  std::size_t lane_bytes;
  std::size_t least_bytes;  // what any limit must leave room for
  std::size_t bytes;        // of workspace
};

/// index_topk_backward where args.d_k is fp32, and is added to. A key's sum runs over the query
/// rows in their order, one after another onto what d_k holds, so that neither threads nor a cut of
/// the rows into several calls change a bit of it.
void index_gradient(const IndexTopkBackward& args, const IndexGradientPlan& plan,
                    const Execution& execution);

/// The fp32 tensor in which gradients of keys are summed: the caller's, to which they are added,
/// or, behind one of bf16 or f16, a copy at the beginning of the workspace.
class KeySums {
 public:
  /// Of the copy. It comes on top of the workspace limit.
  static std::size_t bytes(const Tensor& d_keys);

  KeySums(const Tensor& d_keys, const Execution& execution);
  /// Rounds a copy to the caller's tensor.
  void finish() const;

  Tensor sums;
  Execution rest;  // with the workspace behind the copy

 private:
  Tensor d_keys_;
};

}  // namespace winnow::cpu
