// SPDX-License-Identifier: Apache-2.0
#include "winnow/quantize_fp8.h"

#include <limits>

#include "ops/dispatch.h"

namespace winnow {
namespace {

Checked<QuantizeFp8> checked(const QuantizeFp8& args) {
  Check check("quantize_fp8");
  if (!args.x) check.fail("x", "absent", refusal::absent);
  if (args.x.rank != 2 && args.x.rank != 3) check.fail("x", describe(args.x), refusal::rank_of_x);
  if (args.x.rank == 3) check.set_leading_dim("tokens");
  check.input("x", args.x, {"rows", "dim"}, {DType::bf16, DType::f16, DType::f32});
  check.output("values", args.values, {"rows", "dim"}, {DType::f8_e4m3});
  check.output("scale", args.scale, {"rows"}, {DType::f32});
  check.dim_in_range("dim", 1, std::numeric_limits<std::int32_t>::max());
  return {"quantize_fp8", args, check.device()};
}

}  // namespace

void quantize_fp8(const QuantizeFp8& args, const Execution& execution) {
  run(checked(args), execution);
}
std::size_t workspace_bytes(const QuantizeFp8& args, const Execution& execution) {
  return workspace_bytes(checked(args), execution);
}
std::string why_not(const QuantizeFp8& args, const Execution& execution) {
  return why_not(checked(args), execution);
}

}  // namespace winnow
