// SPDX-License-Identifier: Apache-2.0
#include "winnow/value_projection.h"

#include "ops/dispatch.h"

namespace winnow {
namespace {

void check_sizes(const Check& check) {
  check.dim_in_range("heads", 1, kMaxInt32);
  check.dim_in_range("head_dim", 1, kMaxInt32);
  check.dim_in_range("v_dim", 8, 1024);
  check.dim_multiple_of("v_dim", 8);
}

}  // namespace

Checked<ValueProjectionForward> checked(const ValueProjectionForward& args) {
  Check check(ValueProjectionForward::kOperator);
  check.input("out", args.out, {"tokens", "heads", "v_dim"}, kActivationTypes);
  check.input("w_v", args.w_v, {"heads", "head_dim", "v_dim"}, {args.out.dtype});
  check.output("out_v", args.out_v, {"tokens", "heads", "head_dim"}, {args.out.dtype});
  check_sizes(check);
  return {args, check.device()};
}

Checked<ValueProjectionBackward> checked(const ValueProjectionBackward& args) {
  Check check(ValueProjectionBackward::kOperator);
  check.input("out", args.out, {"tokens", "heads", "v_dim"}, kActivationTypes);
  check.input("w_v", args.w_v, {"heads", "head_dim", "v_dim"}, {args.out.dtype});
  check.input("d_out_v", args.d_out_v, {"tokens", "heads", "head_dim"}, {args.out.dtype});
  check.output("d_out", args.d_out, {"tokens", "heads", "v_dim"}, {args.out.dtype});
  check.output("d_w_v", args.d_w_v, {"heads", "head_dim", "v_dim"},
               {accumulation_type(args.out.dtype), args.out.dtype});
  check_sizes(check);
  return {args, check.device()};
}

template struct Operator<ValueProjectionForward>;
template struct Operator<ValueProjectionBackward>;

}  // namespace winnow
