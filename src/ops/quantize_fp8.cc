// SPDX-License-Identifier: Apache-2.0
#include "winnow/quantize_fp8.h"

#include "ops/dispatch.h"

namespace winnow {

Checked<QuantizeFp8> checked(const QuantizeFp8& args) {
  Check check(QuantizeFp8::kOperator);
  if (!args.x) check.fail("x", "absent", refusal::absent);
  if (args.x.rank != 2 && args.x.rank != 3) check.fail("x", describe(args.x), refusal::rank_of_x);
  if (args.x.rank == 3) check.set_leading_dim("tokens");
  check.input("x", args.x, {"rows", "dim"}, {DType::bf16, DType::f16, DType::f32});
  check.output("values", args.values, {"rows", "dim"}, {DType::f8_e4m3});
  check.output("scale", args.scale, {"rows"}, {DType::f32});
  check.dim_in_range("dim", 1, kMaxInt32);
  return {args, check.device()};
}

template struct Operator<QuantizeFp8>;

}  // namespace winnow
