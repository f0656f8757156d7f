// SPDX-License-Identifier: Apache-2.0
// One struct for each op: all the memory of a case, filled, and the calls on it.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "harness/inputs.h"
#include "harness/workload.h"

namespace winnow::harness {

/// Placement::rows does not matter here: windows of all queries are made.
struct KeyWindowsWork {
  KeyWindowsWork(const Case& c, const Placement& placement, std::uint64_t seed);
  std::vector<Step> steps() const;

  Buffers buffers;
  Buffer &cu_seqlens, &cu_seqlens_padded, &query_rows, &begin, &end;
  KeyWindows args;  // with the ratio of the case
};

/// Placement::rows does not matter here: lists of all queries are made.
struct WindowIndicesWork {
  WindowIndicesWork(const Case& c, const Placement& placement, std::uint64_t seed);
  std::vector<Step> steps() const;

  std::vector<std::int32_t> pool_ids;  // empty: the case has no pools
  WindowLists all_pools;               // what the lists hold without pool ids
  Buffers buffers;
  Buffer &cu_seqlens, &cu_seqlens_padded, &query_rows, &pool_id_buffer;
  Buffer &indices, &lengths, &wide_indices;
  WindowIndices args;            // with pool ids, where there are pools
  WindowIndices all_pools_args;  // without; wider lists
};

struct IndexTopkWork {
  /// With `fp8` q and k are f8_e4m3; the oracle's k holds the dequantised values.
  IndexTopkWork(const Case& c, const Placement& placement, std::uint64_t seed, bool fp8 = false);
  std::vector<Step> steps() const;
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

struct SparseAttentionWork {
  SparseAttentionWork(const Case& c, const Placement& placement, std::uint64_t seed);
  std::vector<Step> steps() const;

  IndexLists lists;  // of the whole case, over all slices of a batch
  double forward_flops, backward_flops;
  Buffers buffers;
  Buffer &q, &kv, &indices, &lengths, &sink, &out, &lse, &max_logits;
  Buffer &d_out, &d_lse, &d_q, &d_kv, &d_kv_rounded, &d_sink;
  SparseAttentionForward forward;
  SparseAttentionBackward backward;          // d_kv is f32, added to
  SparseAttentionBackward backward_rounded;  // in passes, d_kv has the type of kv; absent for f32
};

struct ValueProjectionWork {
  ValueProjectionWork(const Case& c, const Placement& placement, std::uint64_t seed);
  std::vector<Step> steps() const;

  double forward_flops, backward_flops;
  Buffers buffers;
  Buffer &out, &w_v, &out_v, &d_out_v, &d_out, &d_w_v, &d_w_v_rounded;
  ValueProjectionForward forward;
  ValueProjectionBackward backward;          // d_w_v is f32, added to
  ValueProjectionBackward backward_rounded;  // d_w_v has the type of w_v; absent for f32
};

struct IndexTargetWork {
  /// `lse` is a placeholder until the right one is uploaded.
  IndexTargetWork(const Case& c, const Placement& placement, std::uint64_t seed);
  std::vector<Step> steps() const;

  IndexLists lists;  // of the whole case, ids of index keys
  double flops;
  Buffers buffers;
  Buffer &q, &kv, &indices, &lengths, &sink, &lse, &target;
  IndexTarget args;
};

struct IndexLossWork {
  IndexLossWork(const Case& c, const Placement& placement, std::uint64_t seed);
  std::vector<Step> steps() const;

  IndexLists lists;  // of the whole case
  Buffers buffers;
  Buffer &indices, &lengths, &scores, &target, &loss, &d_scores;
  IndexLoss args;
};

struct DenseIndexLossWork {
  DenseIndexLossWork(const Case& c, const Placement& placement, std::uint64_t seed);
  std::vector<Step> steps() const;

  Windows windows;  // of the whole case
  double forward_flops, backward_flops;
  Buffers buffers;
  Buffer &q, &kv, &sink, &index_q, &index_k, &weights, &begin, &end, &loss, &lse;
  Buffer &d_loss, &d_index_q, &d_weights, &d_index_k, &d_index_k_rounded;
  DenseIndexLossForward forward;
  DenseIndexLossBackward backward;          // d_index_k is f32, added to
  DenseIndexLossBackward backward_rounded;  // d_index_k has the type of index_k; absent for f32
};

struct QuantizeFp8Work {
  QuantizeFp8Work(const Case& c, const Placement& placement, std::uint64_t seed);
  std::vector<Step> steps() const;

  Buffers buffers;
  Buffer &keys, &key_values, &key_scale;         // [index keys, index_dim]
  Buffer &queries, &query_values, &query_scale;  // [tokens, index_heads, index_dim]
  QuantizeFp8 of_keys, of_queries;
};

/// The workload of an op without its type: what a benchmark needs.
struct Prepared {
  std::shared_ptr<const void> memory;  // what the steps work on
  std::vector<Step> steps;
  std::size_t bytes = 0;
};
/// Throws std::invalid_argument for an op that is none, listing the names, and for one that the
/// case does not have.
Prepared prepare(std::string_view op, const Case& c, Device device, std::uint64_t seed);

/// The names of all ops that can be prepared and checked.
const std::vector<std::string_view>& ops();

/// Why the case has no such op; empty if it has.
std::string missing(std::string_view op, const Case& c);

}  // namespace winnow::harness
