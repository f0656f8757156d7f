// SPDX-License-Identifier: Apache-2.0
// How sparse attention backward partitions its work, and the workspace that it needs.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "core/threads.h"
#include "cpu/attention.h"
#include "cpu/simd.h"

namespace winnow::cpu {

/// What the first pass saves for the second, for a chunk of query rows and a group of heads. A
/// record belongs to one key of one row: p of all heads, then scale * dS of all heads, each padded
/// to head_padding.
struct Records {
  static constexpr std::int64_t head_padding(std::int64_t heads) {
    return ceil_div(heads, 16) * 16;
  }
  /// Distance between records in floats: an odd number of cache lines, as in padded_stride.
  static constexpr std::int64_t stride(std::int64_t heads) { return 2 * head_padding(heads) + 16; }

  static std::size_t bytes(std::int64_t rows, std::int64_t topk, std::int64_t heads) {
    return Scratch::bytes<float>(rows * topk * stride(heads)) +
           Scratch::bytes<std::int32_t>(rows * topk) + Scratch::bytes<std::int64_t>(rows) +
           Scratch::bytes<double>(rows * heads);
  }
  Records(std::int64_t rows, std::int64_t topk, std::int64_t heads, Scratch& scratch)
      : topk(topk),
        heads(heads),
        values(scratch.take<float>(rows * topk * stride(heads)).data()),
        keys(scratch.take<std::int32_t>(rows * topk).data()),
        counts(scratch.take<std::int64_t>(rows).data()),
        sink_terms(scratch.take<double>(rows * heads).data()) {}

  float* record(std::int64_t row, std::int64_t j) const {
    return values + (row * topk + j) * stride(heads);
  }
  std::int32_t* keys_of(std::int64_t row) const { return keys + row * topk; }

  std::int64_t topk;
  std::int64_t heads;    // in the group
  float* values;         // [rows, topk, stride]
  std::int32_t* keys;    // [rows, topk]   ascending, the first `counts` of each row
  std::int64_t* counts;  // [rows]
  double* sink_terms;    // [rows, heads]  the row's contribution to d_sink
};

/// Scratch of a lane in the first pass, whose tasks are query rows.
struct QueryPass {
  /// Number of keys that are gathered at once.
  static constexpr std::int64_t kBlockKeys = 96;

  static std::size_t bytes(const AttentionSizes& n, std::int64_t heads) {
    return Scratch::bytes<float>(n.qk_dim * padded_stride(heads)) +
           Scratch::bytes<float>(n.v_dim * padded_stride(heads)) +
           Scratch::bytes<float>(kBlockKeys * padded_stride(n.qk_dim)) +
           Scratch::bytes<float>(heads * padded_stride(n.qk_dim)) +
           4 * Scratch::bytes<float>(Records::head_padding(heads));
  }
  QueryPass(const AttentionSizes& n, std::int64_t heads, Scratch& scratch)
      : q(scratch.take<float>(n.qk_dim * padded_stride(heads)).data()),
        d_out(scratch.take<float>(n.v_dim * padded_stride(heads)).data()),
        keys(scratch.take<float>(kBlockKeys * padded_stride(n.qk_dim)).data()),
        d_q(scratch.take<float>(heads * padded_stride(n.qk_dim)).data()),
        share(scratch.take<float>(Records::head_padding(heads)).data()),
        lse(scratch.take<float>(Records::head_padding(heads)).data()),
        delta(scratch.take<float>(Records::head_padding(heads)).data()),
        d_lse(scratch.take<float>(Records::head_padding(heads)).data()) {}

  float* q;      // [qk_dim, heads]
  float* d_out;  // [v_dim, heads]
  float* keys;   // [kBlockKeys, qk_dim]
  float* d_q;    // [heads, qk_dim]
  float* share;  // [heads]  exp(lse - L), what the sink leaves to the keys
  float* lse;    // [heads]
  float* delta;  // [heads]
  float* d_lse;  // [heads]
};

/// Scratch of a lane in the second pass, whose tasks are ranges of keys. d_out is stacked on top of
/// q, so that one product with a record (p, dS) gives its complete d_kv.
struct KeyPass {
  static std::size_t bytes(const AttentionSizes& n, std::int64_t heads) {
    return Scratch::bytes<float>(2 * Records::head_padding(heads) * padded_stride(n.qk_dim));
  }
  KeyPass(const AttentionSizes& n, std::int64_t heads, Scratch& scratch)
      : d_out_and_q(scratch.take<float>(2 * Records::head_padding(heads) * padded_stride(n.qk_dim))
                        .data()) {}

  float* d_out_and_q;  // [2, head_padding, qk_dim]
};

/// Chooses the groups of heads and how many query rows (a chunk) the first pass records before the
/// second pass runs. d_kv is summed over groups, then over query rows, and the groups depend on
/// shapes alone, so neither the number of lanes nor the workspace limit changes a bit.
class BackwardPlan {
 public:
  BackwardPlan(const AttentionSizes& n, const Execution& execution)
      : n_(n), groups_(groups_of(n)), lane_bytes_(lane_bytes(n)) {
    // Enough rows to balance the lanes, few enough for the records to stay in L3.
    constexpr std::size_t kRowsPerLane = 16;
    const std::size_t limit = execution.workspace_limit;
    const std::size_t row = Records::bytes(1, n.topk, groups_.max_size());
    const auto threads = static_cast<std::size_t>(thread_count(execution));
    const auto max_rows = static_cast<std::size_t>(std::max<std::int64_t>(n.tokens, 1));
    const std::size_t fixed = min_bytes(n) - lane_bytes_;
    lanes_ = std::clamp<std::size_t>((limit - std::min(limit, fixed)) / lane_bytes_, 1, threads);
    const std::size_t others = lanes_ * lane_bytes_ + (fixed - row);
    const std::size_t fitting = (limit - std::min(limit, others)) / row;
    rows_ = static_cast<std::int64_t>(
        std::clamp<std::size_t>(std::min(fitting, kRowsPerLane * lanes_), 1, max_rows));
  }

  /// The smallest workspace in which a call can run.
  static std::size_t min_bytes(const AttentionSizes& n) {
    return Scratch::bytes<double>(n.heads) + Records::bytes(1, n.topk, groups_of(n).max_size()) +
           lane_bytes(n);
  }
  /// Bytes shared by all lanes: the accumulator of d_sink and the records.
  std::size_t shared_bytes() const {
    return Scratch::bytes<double>(n_.heads) + Records::bytes(rows_, n_.topk, groups_.max_size());
  }
  std::size_t bytes() const { return shared_bytes() + lanes_ * lane_bytes_; }

  const HeadGroups& groups() const { return groups_; }
  std::int64_t rows() const { return rows_; }
  std::size_t lanes() const { return lanes_; }
  std::size_t lane_bytes() const { return lane_bytes_; }

 private:
  /// The largest groups whose matrices stay in L2.
  static HeadGroups groups_of(const AttentionSizes& n) {
    constexpr std::int64_t kMaxHeads = 64;
    return {n.heads, n.qk_dim, kMaxHeads};
  }
  static std::size_t lane_bytes(const AttentionSizes& n) {
    const std::int64_t heads = groups_of(n).max_size();
    return std::max(QueryPass::bytes(n, heads), KeyPass::bytes(n, heads));
  }

  AttentionSizes n_;
  HeadGroups groups_;
  std::size_t lane_bytes_;
  std::size_t lanes_;
  std::int64_t rows_;
};

}  // namespace winnow::cpu
