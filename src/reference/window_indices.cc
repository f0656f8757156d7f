// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "backend_operators.h"
#include "reference/documents.h"

namespace winnow::reference {

void run(const WindowIndices& args, const Execution&) {
  const Documents documents(args.cu_seqlens, args.cu_seqlens_padded, args.query_rows, args.ratio);
  const View<const std::int32_t, 2> pool_ids(args.pool_ids);
  const View<std::int32_t, 2> indices(args.indices);
  const View<std::int32_t, 1> lengths(args.lengths);
  for (std::int64_t t = 0; t < args.indices.shape[0]; ++t) {
    std::int64_t length = 0;
    const auto append = [&](std::int64_t key) {
      indices(t, length++) = static_cast<std::int32_t>(key);
    };

    const std::int64_t row = documents.row(t);
    const RowPlace place = documents.place(row);
    if (place.in_document && place.position < place.real_length) {
      for (std::int64_t s = std::max(place.document_begin, row - args.window + 1); s <= row; ++s)
        append(s);
      const std::int64_t pool_end =
          place.pool_begin + (args.ratio > 0 ? (place.position + 1) / args.ratio : 0);
      if (pool_ids) {
        for (std::int64_t j = 0; j < args.pool_ids.shape[1]; ++j) {
          const std::int64_t entry = pool_ids(t, j);
          if (entry >= place.pool_begin && entry < pool_end) append(args.key_offset + entry);
        }
      } else {
        for (std::int64_t entry = place.pool_begin; entry < pool_end; ++entry)
          append(args.key_offset + entry);
      }
    }
    lengths(t) = static_cast<std::int32_t>(length);
    while (length < args.indices.shape[1]) append(-1);
  }
}

}  // namespace winnow::reference
