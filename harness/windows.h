// SPDX-License-Identifier: Apache-2.0
// The ops that make integers from documents: key_windows and window_indices. Their memory, their
// calls and their checks.
#pragma once

#include <cstdint>
#include <vector>

#include "harness/buffers.h"
#include "harness/calls.h"
#include "harness/compare.h"
#include "harness/inputs.h"

namespace winnow::harness {

/// Placement::rows does not matter here: windows of all queries are made.
struct KeyWindowsWork {
  KeyWindowsWork(const Case& c, const Placement& placement, std::uint64_t seed);
  std::vector<Call> calls() const;

  Buffers buffers;
  Buffer &cu_seqlens, &cu_seqlens_padded, &query_rows, &begin, &end;
  KeyWindows args;  // with the ratio of the case
};

std::vector<Report> check_key_windows(const Case& c, const Execution& execution,
                                      std::uint64_t seed);

/// Placement::rows does not matter here: lists of all queries are made.
struct WindowIndicesWork {
  WindowIndicesWork(const Case& c, const Placement& placement, std::uint64_t seed);
  std::vector<Call> calls() const;

  std::vector<std::int32_t> pool_ids;  // empty: the case has no pools
  WindowLists all_pools;               // what the lists hold without pool ids
  Buffers buffers;
  Buffer &cu_seqlens, &cu_seqlens_padded, &query_rows, &pool_id_buffer;
  Buffer &indices, &lengths, &wide_indices;
  WindowIndices args;            // with pool ids, where there are pools
  WindowIndices all_pools_args;  // without; wider lists
};

std::vector<Report> check_window_indices(const Case& c, const Execution& execution,
                                         std::uint64_t seed);

}  // namespace winnow::harness
