// SPDX-License-Identifier: Apache-2.0
// Workloads of the ops that make integers from documents: key_windows and window_indices.
#include <algorithm>

#include "harness/windows.h"

namespace winnow::harness {
namespace {

Buffer& padded_offsets(Buffers& buffers, const Case& c, std::uint64_t seed) {
  return c.padded ? buffers.ints("cu_seqlens_padded", documents_of(c, seed).cu_seqlens_padded)
                  : buffers.absent();
}

Buffer& global_rows(Buffers& buffers, const Case& c) {
  return c.has_query_rows() ? buffers.ints("query_rows", query_rows_of(c)) : buffers.absent();
}

/// All queries: these ops are cheap, and the documents are those of the whole case.
Placement whole(const Placement& placement) { return {.device = placement.device}; }

std::vector<std::int32_t> pool_ids_of(const Case& c, std::uint64_t seed) {
  if (!c.has_pools()) return {};
  return index_lists(c, seed, c.tokens, c.pools(), c.index_topk()).indices;
}

std::int64_t longest(const WindowLists& lists) {
  std::size_t length = 1;
  for (const auto& list : lists) length = std::max(length, list.size());
  return static_cast<std::int64_t>(length);
}

}  // namespace

KeyWindowsWork::KeyWindowsWork(const Case& c, const Placement& placement, std::uint64_t seed)
    : buffers(c, whole(placement), seed),
      cu_seqlens(buffers.ints("cu_seqlens", documents_of(c, seed).cu_seqlens)),
      cu_seqlens_padded(padded_offsets(buffers, c, seed)),
      query_rows(global_rows(buffers, c)),
      begin(buffers.query_output("begin", DType::i32, {})),
      end(buffers.query_output("end", DType::i32, {})),
      args(buffers.arguments<KeyWindows>()) {
  args.ratio = c.ratio;
}

std::vector<Call> KeyWindowsWork::calls() const { return {call(args)}; }

WindowIndicesWork::WindowIndicesWork(const Case& c, const Placement& placement, std::uint64_t seed)
    : pool_ids(pool_ids_of(c, seed)),
      all_pools(window_lists(c, seed, {})),
      buffers(c, whole(placement), seed),
      cu_seqlens(buffers.ints("cu_seqlens", documents_of(c, seed).cu_seqlens)),
      cu_seqlens_padded(padded_offsets(buffers, c, seed)),
      query_rows(global_rows(buffers, c)),
      pool_id_buffer(c.has_pools() ? buffers.query_ints("pool_ids", {c.index_topk()}, pool_ids)
                                   : buffers.absent()),
      indices(buffers.query_output("indices", DType::i32, {c.topk})),
      lengths(buffers.query_output("lengths", DType::i32, {})),
      wide_indices(buffers.query_output("wide_indices", DType::i32, {longest(all_pools)})),
      args(buffers.arguments<WindowIndices>()) {
  args.window = c.window;
  args.ratio = c.has_pools() ? c.ratio : 0;
  args.key_offset = c.key_offset();
  all_pools_args = args;
  all_pools_args.pool_ids = {};
  all_pools_args.indices = wide_indices.tensor();
}

std::vector<Call> WindowIndicesWork::calls() const { return {call(args)}; }

}  // namespace winnow::harness
