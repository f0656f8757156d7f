// SPDX-License-Identifier: Apache-2.0
// The gradients through the indexer's scores, for index_topk and dense_index_loss.
#pragma once

#include <cstddef>
#include <cstdint>

#include "winnow/index_topk.h"

namespace winnow::cpu {

/// How index_gradient partitions its work within the workspace limit of `execution`.
struct IndexGradientPlan {
  IndexGradientPlan(const IndexTopkBackward& args, bool with_pairs, const Execution& execution);

  bool with_pairs;  // whether pairs of bf16 are multiplied in the rows that suit them
  std::int64_t heads, dim, topk;
  std::int64_t row_stride;   // of rows of `dim` elements
  std::int64_t head_stride;  // of rows of `heads` elements
  std::int64_t sign_bytes;   // bytes of the sign bits of one slot
  int range_shift;           // a range has 2^range_shift keys
  std::int64_t ranges;
  std::int64_t chunk_rows;   // query rows that are recorded at a time
  std::size_t record_bytes;  // of one query row
  std::size_t lane_bytes;
  std::size_t min_bytes;  // the smallest workspace limit that suffices
  std::size_t bytes;      // of the whole workspace
};

/// index_topk_backward for a d_k of fp32, which is added to. Each key is summed in the order of the
/// query rows, starting from what d_k holds, so that neither the number of threads nor a split of
/// the rows over several calls changes a bit.
void index_gradient(const IndexTopkBackward& args, const IndexGradientPlan& plan,
                    const Execution& execution);

/// The fp32 accumulator of the gradients of keys: the caller's tensor if that is fp32, else zeroed
/// memory at the beginning of the workspace, which finish() rounds to the caller's bf16 or f16.
class KeySums {
 public:
  /// Bytes of that memory, which the workspace limit does not count.
  static std::size_t bytes(const Tensor& d_keys);

  KeySums(const Tensor& d_keys, const Execution& execution);
  /// Rounds the accumulator to the caller's tensor, unless it is that tensor.
  void finish() const;

  Tensor sums;
  Execution rest;  // with the workspace that remains after the accumulator

 private:
  Tensor d_keys_;
};

}  // namespace winnow::cpu
