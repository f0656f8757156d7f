// SPDX-License-Identifier: Apache-2.0
#include "winnow/key_windows.h"

#include "ops/contents.h"
#include "ops/dispatch.h"

namespace winnow {

Checked<KeyWindows> checked(const KeyWindows& args) {
  Check check(KeyWindows::kOperator);
  check.input("cu_seqlens", args.cu_seqlens, {"documents + 1"}, {DType::i32});
  check.optional_input("cu_seqlens_padded", args.cu_seqlens_padded, {"documents + 1"},
                       {DType::i32});
  check.optional_input("query_rows", args.query_rows, {"tokens"}, {DType::i32});
  check.output("begin", args.begin, {"tokens"}, {DType::i32});
  check.output("end", args.end, {"tokens"}, {DType::i32});
  check.dim_in_range("documents + 1", 1, kMaxInt32);
  check.in_range("ratio", args.ratio, 1, kMaxInt32);
  check.in_range("padding_rows", static_cast<std::int32_t>(args.padding_rows), 0,
                 static_cast<std::int32_t>(PaddingRows::see_document));
  check_documents(check, args.cu_seqlens, args.cu_seqlens_padded, args.query_rows);
  return {args, check.device()};
}

template struct Operator<KeyWindows>;

}  // namespace winnow
