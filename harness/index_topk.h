// SPDX-License-Identifier: Apache-2.0
// index_topk: its memory, its calls and its check.
#pragma once

#include <cstdint>
#include <vector>

#include "harness/buffers.h"
#include "harness/calls.h"
#include "harness/compare.h"
#include "harness/inputs.h"

namespace winnow::harness {

struct IndexTopkWork {
  /// With `fp8` q and k are f8_e4m3; the oracle's k holds the dequantised values.
  IndexTopkWork(const Case& c, const Placement& placement, std::uint64_t seed, bool fp8 = false);
  /// Whether slot j of replayed row t of the case holds a key of the row's window.
  bool replayed(std::int64_t t, std::int64_t j) const;

  Windows windows;          // of the whole case
  IndexLists replay_lists;  // likewise; a part of these keys lies in the windows
  double forward_flops, backward_flops;
  Buffers buffers;
  Buffer &q, &k, &weights, &k_scale, &begin, &end;
  Buffer &indices, &lengths, &scores, &d_scores;
  Buffer &replay_indices, &replay_lengths, &replay_scores, &replay_d_scores;
  Buffer &d_q, &d_weights, &d_k, &d_k_rounded;
  IndexTopkForward forward, replay;
  IndexTopkBackward backward;         // from the indices that forward chose; d_k is f32, added to
  IndexTopkBackward replay_backward;  // from the replayed ones; d_k is rounded, but for f32
};

/// Selection in the working type and in fp8.
struct IndexTopkWorks {
  IndexTopkWorks(const Case& c, const Placement& placement, std::uint64_t seed)
      : plain(c, placement, seed), fp8(c, placement, seed, true) {}
  std::vector<Call> calls() const;

  IndexTopkWork plain, fp8;
};

std::vector<Report> check_index_topk(const Case& c, const Execution& execution, std::uint64_t seed);

}  // namespace winnow::harness
