// SPDX-License-Identifier: Apache-2.0
// How the indexer forward partitions its work, and the workspace that it needs.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "core/threads.h"
#include "cpu/bf16_pairs.h"
#include "cpu/elements.h"
#include "cpu/plan.h"
#include "cpu/selection_plan.h"
#include "cpu/simd.h"
#include "winnow/index_topk.h"

namespace winnow::cpu {

/// A selected slot as one integer to sort by: the sort key of its score, descending, in the upper
/// half, and the slot in the lower half.
using RankedSlot = std::uint64_t;

/// Sizes of a call, independent of the SIMD target.
struct IndexForwardPlan {
  bool with_pairs;  // whether products are of pairs
  std::int64_t tokens, heads, dim, topk;
  SelectionPlan selection;
  std::size_t fixed_bytes;  // scratch per task
  std::size_t row_bytes;    // scratch per row of a task, in addition
  std::int64_t rows;        // in a task
  std::int64_t parts = 1;   // into which the keys of the rows of a task are split

  IndexForwardPlan(const IndexTopkForward& args, bool with_pairs, const Execution& execution)
      : with_pairs(with_pairs),
        tokens(args.q.shape[0]),
        heads(args.q.shape[1]),
        dim(args.q.shape[2]),
        topk(args.indices.shape[1]),
        selection(args.k.shape[0], topk),
        fixed_bytes(panel_bytes<float>() + (may_have_pairs(args) ? panel_bytes<Bf16Pair>() : 0) +
                    Scratch::bytes<float>(kColumnPadding * heads) +
                    2 * Scratch::bytes<float>(kColumnPadding)),
        row_bytes(q_bytes<float>() + (may_have_pairs(args) ? q_bytes<Bf16Pair>() : 0) +
                  Scratch::bytes<float>(heads)),
        rows(1) {
    if (args.replay) return;
    // The queries, which are read again for every panel, get half of an L2 of 512 KiB.
    const auto q_size = static_cast<std::int64_t>(q_bytes<float>());
    const std::int64_t cached = (std::int64_t{1} << 18) / q_size;
    row_bytes += selection.bytes();
    if (args.order == SlotOrder::by_score)
      fixed_bytes += Scratch::bytes<RankedSlot>(selection.topk);
    rows = rows_per_task(tokens, std::clamp<std::int64_t>(cached, 4, 64), fixed_bytes, row_bytes,
                         execution);
    parts =
        std::max<std::int64_t>(thread_count(execution) / std::max<std::int64_t>(groups(), 1), 1);
    const auto threads = static_cast<std::size_t>(thread_count(execution));
    if (parts_bytes() + threads * scratch_bytes() > execution.workspace_limit) parts = 1;
  }
  /// Distance between rows of channels, in elements.
  template <class Element>
  std::int64_t stride() const {
    return padded_stride(elements_of<Element>(dim));
  }
  /// Bytes of a query row, and of the keys of a panel, as elements.
  template <class Element>
  std::size_t q_bytes() const {
    return Scratch::bytes<Element>(heads * stride<Element>());
  }
  template <class Element>
  std::size_t panel_bytes() const {
    return Scratch::bytes<Element>(kColumnPadding * stride<Element>()) +
           Scratch::bytes<Element>(kColumnPadding * elements_of<Element>(dim));
  }
  /// Number of groups of query rows; a task is one group and one part of its keys.
  std::int64_t groups() const { return ceil_div(tokens, rows); }
  std::size_t scratch_bytes() const {
    return fixed_bytes + static_cast<std::size_t>(rows) * row_bytes;
  }
  /// Bytes that one part of the keys of one row hands to merge_parts: a count and the selection.
  std::size_t part_bytes() const { return Scratch::bytes<std::int64_t>(1) + selection.bytes(); }
  std::size_t parts_bytes() const {
    return parts == 1 ? 0 : static_cast<std::size_t>(tokens * parts) * part_bytes();
  }
  Scratch part_of(const Execution& execution, std::int64_t t, std::int64_t part) const {
    const std::size_t offset = static_cast<std::size_t>(t * parts + part) * part_bytes();
    return {static_cast<std::byte*>(execution.workspace) + offset, part_bytes()};
  }
};

}  // namespace winnow::cpu
