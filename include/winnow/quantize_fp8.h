// SPDX-License-Identifier: Apache-2.0
// quantize_fp8: quantises rows to fp8 (e4m3) with one scale per row, for index_topk.
#pragma once

#include <tuple>

#include "winnow/call.h"

namespace winnow {

/// For every row (the last dimension): amax = max(largest finite |x|, 1e-4); scale = amax / 448, or
/// with power_of_two the smallest power of two that is at least that; values = x / scale in fp32,
/// rounded to nearest even. +-inf becomes +-448, NaN stays NaN.
struct QuantizeFp8 {
  Tensor x{};       // [rows, dim] or [tokens, heads, dim]  bf16 | f16 | f32
  Tensor values{};  // as x                                 f8_e4m3, out
  Tensor scale{};   // x without its last dimension         f32, out
  bool power_of_two = false;

  static constexpr char kOperator[] = "quantize_fp8";
  static constexpr auto fields() {
    using Args = QuantizeFp8;
    return std::tuple{fields::input("x", &Args::x), fields::output("values", &Args::values),
                      fields::output("scale", &Args::scale),
                      fields::option("power_of_two", &Args::power_of_two)};
  }
};

extern template struct Operator<QuantizeFp8>;

inline void quantize_fp8(const QuantizeFp8& args, const Execution& execution = {}) {
  run(args, execution);
}

}  // namespace winnow
