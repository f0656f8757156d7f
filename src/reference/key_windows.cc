// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "backend_operators.h"
#include "reference/documents.h"

namespace winnow::reference {

void run(const KeyWindows& args, const Execution&) {
  const Documents documents(args.cu_seqlens, args.cu_seqlens_padded, args.query_rows, args.ratio);
  const View<std::int32_t, 1> begin(args.begin);
  const View<std::int32_t, 1> end(args.end);
  for (std::int64_t t = 0; t < args.begin.shape[0]; ++t) {
    const RowPlace place = documents.place(documents.row(t));
    const bool is_padding = place.position >= place.real_length;
    const bool sees_keys =
        place.in_document && (!is_padding || args.padding_rows == PaddingRows::see_document);
    const std::int64_t first = args.ratio == 1 ? place.document_begin : place.pool_begin;
    std::int64_t seen = 0;
    if (sees_keys) seen = std::min(place.position + 1, place.real_length) / args.ratio;
    if (sees_keys && is_padding && args.ratio == 1) seen = std::max<std::int64_t>(seen, 1);
    begin(t) = static_cast<std::int32_t>(first);
    end(t) = static_cast<std::int32_t>(first + seen);
  }
}

}  // namespace winnow::reference
