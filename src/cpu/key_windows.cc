// SPDX-License-Identifier: Apache-2.0
// Key windows of packed documents. Not vectorised: a binary search and a few integers per row.
#include <algorithm>

#include "backend_operators.h"
#include "cpu/documents.h"
#include "cpu/plan.h"

namespace winnow::cpu {

std::size_t workspace_bytes(const KeyWindows& args, const Execution&) {
  return Documents::bytes(args.cu_seqlens);
}

std::string why_not(const KeyWindows& args, const Execution& execution) {
  return over_limit(Documents::bytes(args.cu_seqlens), execution);
}

void run(const KeyWindows& args, const Execution& execution) {
  const Documents documents(args.cu_seqlens, args.cu_seqlens_padded, args.query_rows, args.ratio,
                            execution);
  const View<std::int32_t, 1> begin(args.begin);
  const View<std::int32_t, 1> end(args.end);
  for_rows(execution, args.begin.shape[0], [&](std::int64_t t) {
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
  });
}

}  // namespace winnow::cpu
