// SPDX-License-Identifier: Apache-2.0
// sparse_attention: its memory, its calls and its check.
#pragma once

#include <cstdint>
#include <vector>

#include "harness/buffers.h"
#include "harness/calls.h"
#include "harness/compare.h"
#include "harness/inputs.h"

namespace winnow::harness {

struct SparseAttentionWork {
  SparseAttentionWork(const Case& c, const Placement& placement, std::uint64_t seed);
  std::vector<Call> calls() const;

  IndexLists lists;  // of the whole case, over all slices of a batch
  double forward_flops, backward_flops;
  Buffers buffers;
  Buffer &q, &kv, &indices, &lengths, &sink, &out, &lse, &max_logits;
  Buffer &d_out, &d_lse, &d_q, &d_kv, &d_kv_rounded, &d_sink;
  SparseAttentionForward forward;
  SparseAttentionBackward backward;          // d_kv is f32, added to
  SparseAttentionBackward backward_rounded;  // in passes, d_kv has the type of kv; absent for f32
};

std::vector<Report> check_sparse_attention(const Case& c, const Execution& execution,
                                           std::uint64_t seed);

}  // namespace winnow::harness
