// SPDX-License-Identifier: Apache-2.0
// Index lists of a sliding window and pool entries. Bound by the memory writes of the lists.
#include <algorithm>
#include <numeric>

#include "backend_operators.h"
#include "cpu/documents.h"
#include "cpu/plan.h"

namespace winnow::cpu {

std::size_t workspace_bytes(const WindowIndices& args, const Execution&) {
  return Documents::bytes(args.cu_seqlens);
}

std::string why_not(const WindowIndices& args, const Execution& execution) {
  return over_limit(Documents::bytes(args.cu_seqlens), execution);
}

void run(const WindowIndices& args, const Execution& execution) {
  const Documents documents(args.cu_seqlens, args.cu_seqlens_padded, args.query_rows, args.ratio,
                            execution);
  const View<const std::int32_t, 2> pool_ids(args.pool_ids);
  const View<std::int32_t, 2> indices(args.indices);
  const View<std::int32_t, 1> lengths(args.lengths);
  for_rows(execution, args.indices.shape[0], [&](std::int64_t t) {
    std::int32_t* const list = &indices(t, 0);
    std::int32_t* next = list;
    const auto append_range = [&](std::int64_t first, std::int64_t last) {
      if (first >= last) return;
      std::iota(next, next + (last - first), static_cast<std::int32_t>(first));
      next += last - first;
    };

    const std::int64_t row = documents.row(t);
    const RowPlace place = documents.place(row);
    if (place.in_document && place.position < place.real_length) {
      append_range(std::max(place.document_begin, row - args.window + 1), row + 1);
      const std::int64_t pool_end =
          place.pool_begin + (args.ratio > 0 ? (place.position + 1) / args.ratio : 0);
      if (pool_ids) {
        for (std::int64_t j = 0; j < args.pool_ids.shape[1]; ++j) {
          const std::int32_t entry = pool_ids(t, j);
          if (entry >= place.pool_begin && entry < pool_end) *next++ = args.key_offset + entry;
        }
      } else {
        append_range(args.key_offset + place.pool_begin, args.key_offset + pool_end);
      }
    }
    lengths(t) = static_cast<std::int32_t>(next - list);
    std::fill(next, list + args.indices.shape[1], -1);
  });
}

}  // namespace winnow::cpu
