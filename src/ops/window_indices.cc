// SPDX-License-Identifier: Apache-2.0
#include "winnow/window_indices.h"

#include <algorithm>

#include "core/documents.h"
#include "core/view.h"
#include "ops/contents.h"
#include "ops/dispatch.h"

namespace winnow {
namespace {

/// Entries of the longest list that a query asks for.
std::int64_t longest_list(const WindowIndices& args) {
  const View<const std::int32_t, 1> real(args.cu_seqlens);
  const View<const std::int32_t, 1> padded(args.cu_seqlens_padded ? args.cu_seqlens_padded
                                                                  : args.cu_seqlens);
  const View<const std::int32_t, 1> query_rows(args.query_rows);
  const std::int64_t documents = args.cu_seqlens.shape[0] - 1;
  std::int64_t longest = 0;
  for (std::int64_t t = 0; t < args.indices.shape[0]; ++t) {
    const std::int64_t row = query_rows ? query_rows(t) : t;
    if (row < 0 || row >= padded(documents)) continue;
    const std::int64_t document = document_of(row, padded, documents);
    const std::int64_t seen = row - padded(document) + 1;
    if (seen > real(document + 1) - real(document)) continue;  // a padding row
    const std::int64_t pools = args.ratio > 0 ? seen / args.ratio : 0;
    longest = std::max(longest, std::min<std::int64_t>(seen, args.window) + pools);
  }
  return longest;
}

/// Where the offsets can be read, a list that would be cut and a pool that would stand among rows
/// are refused.
void check_lists(const Check& check, const WindowIndices& args) {
  if (!check.on_host()) return;
  const View<const std::int32_t, 1> real(args.cu_seqlens);
  const View<const std::int32_t, 1> padded(args.cu_seqlens_padded ? args.cu_seqlens_padded
                                                                  : args.cu_seqlens);
  const std::int64_t documents = args.cu_seqlens.shape[0] - 1;
  if (args.ratio > 0) {
    std::int64_t pools = 0;
    for (std::int64_t i = 0; i < documents; ++i) pools += (real(i + 1) - real(i)) / args.ratio;
    if (args.key_offset < padded(documents)) {
      check.fail("key_offset", fmt::to_string(args.key_offset), refusal::at_least_as,
                 padded(documents), "there are rows");
    }
    if (args.key_offset > kMaxInt32 - pools) {
      check.fail("key_offset", fmt::to_string(args.key_offset), refusal::at_most,
                 kMaxInt32 - pools);
    }
  }
  if (args.pool_ids) return;
  const std::int64_t longest = longest_list(args);
  if (args.indices.shape[1] < longest) {
    check.fail("indices", describe(args.indices), refusal::narrow_list, longest);
  }
}

}  // namespace

Checked<WindowIndices> checked(const WindowIndices& args) {
  Check check(WindowIndices::kOperator);
  check.input("cu_seqlens", args.cu_seqlens, {"documents + 1"}, {DType::i32});
  check.optional_input("cu_seqlens_padded", args.cu_seqlens_padded, {"documents + 1"},
                       {DType::i32});
  check.optional_input("query_rows", args.query_rows, {"tokens"}, {DType::i32});
  check.optional_input("pool_ids", args.pool_ids, {"tokens", "pool_topk"}, {DType::i32});
  check.output("indices", args.indices, {"tokens", "topk"}, {DType::i32});
  check.output("lengths", args.lengths, {"tokens"}, {DType::i32});
  check.dim_in_range("documents + 1", 1, kMaxInt32);
  check.dim_in_range("topk", 1, kMaxTopk);
  check.in_range("window", args.window, 0, kMaxInt32);
  check.in_range("ratio", args.ratio, 0, kMaxInt32);
  if (args.ratio == 1) check.fail("ratio", "1", refusal::one_of, "0 or at least 2");
  check.in_range("key_offset", args.key_offset, 0, kMaxInt32);
  if (args.pool_ids) {
    if (args.ratio == 0) check.fail("pool_ids", describe(args.pool_ids), refusal::needs_pools);
    check.dim_in_range("pool_topk", 0, kMaxTopk);
    check.in_range("window", args.window, 0, kMaxTopk - check.dim("pool_topk"));
    check.dim_in_range("topk", args.window + check.dim("pool_topk"), kMaxTopk);
  }
  check_documents(check, args.cu_seqlens, args.cu_seqlens_padded, args.query_rows);
  check_lists(check, args);
  return {args, check.device()};
}

template struct Operator<WindowIndices>;

}  // namespace winnow
