// SPDX-License-Identifier: Apache-2.0
// How sparse attention backward partitions its work, and the workspace that it needs.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "core/threads.h"
#include "cpu/attention.h"
#include "cpu/elements.h"
#include "cpu/simd.h"

namespace winnow::cpu {

/// Heads, padded to whole vectors of records.
inline constexpr std::int64_t head_padding(std::int64_t heads) { return ceil_div(heads, 16) * 16; }

/// What the first pass saves for the second, for a chunk of query rows and a group of heads. A
/// record belongs to one key of one row: p of all heads, then scale * dS of all heads, each padded
/// to head_padding; as floats, or as pairs of neighbouring heads.
struct Records {
  /// Distance between records in elements: an odd number of cache lines, as in padded_stride.
  template <class Element>
  static constexpr std::int64_t stride(std::int64_t heads) {
    constexpr std::int64_t kCacheLine = 64 / sizeof(Element);
    return (2 * elements_of<Element>(head_padding(heads)) / kCacheLine | 1) * kCacheLine;
  }

  static std::size_t bytes(std::int64_t rows, std::int64_t topk, std::int64_t heads) {
    return Scratch::bytes<float>(rows * topk * stride<float>(heads)) +
           Scratch::bytes<std::int32_t>(rows * topk) + Scratch::bytes<std::int64_t>(rows) +
           Scratch::bytes<bool>(rows) + Scratch::bytes<double>(rows * heads);
  }
  Records(std::int64_t rows, std::int64_t topk, std::int64_t heads, Scratch& scratch)
      : topk(topk),
        heads(heads),
        values(scratch.take<float>(rows * topk * stride<float>(heads)).data()),
        keys(scratch.take<std::int32_t>(rows * topk).data()),
        counts(scratch.take<std::int64_t>(rows).data()),
        are_pairs(scratch.take<bool>(rows).data()),
        sink_terms(scratch.take<double>(rows * heads).data()) {}

  template <class Element>
  Element* record(std::int64_t row, std::int64_t j) const {
    static_assert(sizeof(Element) == sizeof(float));
    float* const of_row = values + row * topk * stride<float>(heads);
    return reinterpret_cast<Element*>(of_row) + j * stride<Element>(heads);
  }
  std::int32_t* keys_of(std::int64_t row) const { return keys + row * topk; }

  std::int64_t topk;
  std::int64_t heads;    // in the group
  float* values;         // [rows, topk, stride], room for floats
  std::int32_t* keys;    // [rows, topk]   ascending, the first `counts` of each row
  std::int64_t* counts;  // [rows]
  bool* are_pairs;       // [rows]         whether the row's records are pairs
  double* sink_terms;    // [rows, heads]  the row's contribution to d_sink
};

/// Scratch of a lane in the first pass, whose tasks are query rows.
template <class Element>
struct QueryPass {
  /// Number of keys that are gathered at once.
  static constexpr std::int64_t kBlockKeys = 96;
  static constexpr bool kArePairs = kElementDepth<Element> > 1;

  static std::size_t bytes(const AttentionSizes& n, std::int64_t heads) {
    const std::int64_t depth = elements_of<Element>(n.qk_dim);
    std::size_t sum =
        Scratch::bytes<Element>(depth * padded_stride(heads)) +
        Scratch::bytes<Element>(elements_of<Element>(n.v_dim) * padded_stride(heads)) +
        Scratch::bytes<Element>(kBlockKeys * padded_stride(depth)) +
        Scratch::bytes<float>(heads * padded_stride(n.qk_dim)) +
        Scratch::bytes<float>(2 * n.v_dim) + 4 * Scratch::bytes<float>(head_padding(heads));
    if (kArePairs) {
      constexpr std::int64_t kRows = elements_of<Element>(kBlockKeys);
      sum += Scratch::bytes<Element>(kRows * padded_stride(n.qk_dim)) +
             Scratch::bytes<Element>(kRows * head_padding(heads)) +
             Scratch::bytes<float>(kBlockKeys * Records::stride<float>(heads)) +
             3 * Scratch::bytes<float>(head_padding(heads)) + Scratch::bytes<float>(kBlockKeys);
    }
    return sum;
  }
  QueryPass(const AttentionSizes& n, std::int64_t heads, Scratch& scratch)
      : depth(elements_of<Element>(n.qk_dim)),
        q(scratch.take<Element>(depth * padded_stride(heads)).data()),
        d_out(scratch.take<Element>(elements_of<Element>(n.v_dim) * padded_stride(heads)).data()),
        keys(scratch.take<Element>(kBlockKeys * padded_stride(depth)).data()),
        d_q(scratch.take<float>(heads * padded_stride(n.qk_dim)).data()),
        out_rows(scratch.take<float>(2 * n.v_dim).data()),
        share(scratch.take<float>(head_padding(heads)).data()),
        lse(scratch.take<float>(head_padding(heads)).data()),
        delta(scratch.take<float>(head_padding(heads)).data()),
        d_lse(scratch.take<float>(head_padding(heads)).data()) {
    if constexpr (kArePairs) {
      constexpr std::int64_t kRows = elements_of<Element>(kBlockKeys);
      key_pairs = scratch.take<Element>(kRows * padded_stride(n.qk_dim)).data();
      dS_pairs = scratch.take<Element>(kRows * head_padding(heads)).data();
      products = scratch.take<float>(kBlockKeys * Records::stride<float>(heads)).data();
      largest_p = scratch.take<float>(head_padding(heads)).data();
      largest_dS = scratch.take<float>(head_padding(heads)).data();
      largest_d_q_term = scratch.take<float>(head_padding(heads)).data();
      key_magnitudes = scratch.take<float>(kBlockKeys).data();
    }
  }

  std::int64_t depth;  // qk_dim in elements
  Element* q;          // [depth, heads]
  Element* d_out;      // [v_dim in elements, heads]
  Element* keys;       // [kBlockKeys, depth]
  float* d_q;          // [heads, qk_dim]
  float* out_rows;     // [2, v_dim]  out and d_out of a head
  float* share;        // [heads]  exp(lse - L), what the sink leaves to the keys
  float* lse;          // [heads]
  float* delta;        // [heads]
  float* d_lse;        // [heads]
  // Of pairs alone; floats are multiplied in the records.
  Element* key_pairs = nullptr;       // [kBlockKeys / 2, qk_dim]  along the keys
  Element* dS_pairs = nullptr;        // [kBlockKeys / 2, heads]   along the keys
  float* products = nullptr;          // [kBlockKeys, q . k and d_out . v of heads]
  float* largest_p = nullptr;         // [heads]       over the keys, as those below
  float* largest_dS = nullptr;        // [heads]       the magnitude of scale * dS
  float* largest_d_q_term = nullptr;  // [heads]       that of scale * dS * key
  float* key_magnitudes = nullptr;    // [kBlockKeys]  the largest in each key
};

/// Scratch of a lane in the second pass, whose tasks are ranges of keys. d_out is stacked on top of
/// q, so that one product with a record (p, dS) gives its complete d_kv.
template <class Element>
struct KeyPass {
  static std::size_t bytes(const AttentionSizes& n, std::int64_t heads) {
    return Scratch::bytes<Element>(2 * elements_of<Element>(head_padding(heads)) *
                                   padded_stride(n.qk_dim));
  }
  KeyPass(const AttentionSizes& n, std::int64_t heads, Scratch& scratch)
      : rows(elements_of<Element>(head_padding(heads))),
        stride(padded_stride(n.qk_dim)),
        d_out_and_q(scratch.take<Element>(2 * rows * stride)) {
    std::fill(d_out_and_q.begin(), d_out_and_q.end(), Element{});
  }
  Element* d_out() const { return d_out_and_q.data(); }
  Element* q() const { return d_out() + rows * stride; }

  std::int64_t rows;               // of d_out and of q: heads in elements
  std::int64_t stride;             // between rows
  std::span<Element> d_out_and_q;  // [2, rows, qk_dim]
};

/// Chooses the groups of heads and how many query rows (a chunk) the first pass records before the
/// second pass runs. d_kv is summed over groups, then over query rows, and the groups depend on
/// shapes alone, so neither the number of lanes nor the workspace limit changes a bit.
class BackwardPlan {
 public:
  BackwardPlan(const AttentionSizes& n, bool with_pairs, const Execution& execution)
      : n_(n), groups_(groups_of(n)), lane_bytes_(lane_bytes(n, with_pairs)) {
    // Enough rows to balance the lanes, few enough for the records to stay in L3.
    constexpr std::size_t kRowsPerLane = 16;
    const std::size_t limit = execution.workspace_limit;
    const std::size_t row = Records::bytes(1, n.topk, groups_.max_size());
    const auto threads = static_cast<std::size_t>(thread_count(execution));
    const auto max_rows = static_cast<std::size_t>(std::max<std::int64_t>(n.tokens, 1));
    const std::size_t fixed = min_bytes(n, with_pairs) - lane_bytes_;
    lanes_ = std::clamp<std::size_t>((limit - std::min(limit, fixed)) / lane_bytes_, 1, threads);
    const std::size_t others = lanes_ * lane_bytes_ + (fixed - row);
    const std::size_t fitting = (limit - std::min(limit, others)) / row;
    rows_ = static_cast<std::int64_t>(
        std::clamp<std::size_t>(std::min(fitting, kRowsPerLane * lanes_), 1, max_rows));
  }

  /// The smallest workspace in which a call can run.
  static std::size_t min_bytes(const AttentionSizes& n, bool with_pairs) {
    return Scratch::bytes<double>(n.heads) + Records::bytes(1, n.topk, groups_of(n).max_size()) +
           lane_bytes(n, with_pairs);
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
  /// The passes of a lane use the same memory. A row of the first one is of floats or of pairs; in
  /// the second one rows of both kinds meet.
  static std::size_t lane_bytes(const AttentionSizes& n, bool with_pairs) {
    const std::int64_t heads = groups_of(n).max_size();
    const std::size_t floats =
        std::max(QueryPass<float>::bytes(n, heads), KeyPass<float>::bytes(n, heads));
    if (!with_pairs) return floats;
    return std::max({floats, QueryPass<Bf16Pair>::bytes(n, heads),
                     KeyPass<float>::bytes(n, heads) + KeyPass<Bf16Pair>::bytes(n, heads)});
  }

  AttentionSizes n_;
  HeadGroups groups_;
  std::size_t lane_bytes_;
  std::size_t lanes_;
  std::int64_t rows_;
};

}  // namespace winnow::cpu
