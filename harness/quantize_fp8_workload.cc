// SPDX-License-Identifier: Apache-2.0
// The workload of quantize_fp8: rows of many magnitudes, zeros, infinities and NaN.
#include <algorithm>
#include <cmath>
#include <limits>

#include "harness/quantize_fp8.h"

namespace winnow::harness {
namespace {

Values rows_to_quantize(const Buffers& buffers, std::string_view stream) {
  return [normal = buffers.normal(stream)](std::int64_t line, std::span<double> elements) {
    normal(line, elements);
    for (double& element : elements)
      element *= std::ldexp(1.0, static_cast<int>(line * 5 % 24) - 16);
    if (line % 7 == 3) std::fill(elements.begin(), elements.end(), 0.0);
    if (line % 7 == 5 && elements.size() > 2) {
      elements[0] = std::numeric_limits<double>::infinity();
      elements[1] = std::numeric_limits<double>::quiet_NaN();
      elements[2] = -elements[0];
    }
  };
}

}  // namespace

QuantizeFp8Work::QuantizeFp8Work(const Case& c, const Placement& placement, std::uint64_t seed)
    : buffers(c, placement, seed),
      keys(buffers.input("keys", c.dtype, {c.index_keys(), c.index_dim},
                         rows_to_quantize(buffers, "keys"))),
      key_values(buffers.output("key_values", DType::f8_e4m3, {c.index_keys(), c.index_dim})),
      key_scale(buffers.output("key_scale", DType::f32, {c.index_keys()})),
      queries(buffers.query_input("queries", c.dtype, {c.index_heads, c.index_dim},
                                  rows_to_quantize(buffers, "queries"))),
      query_values(
          buffers.query_output("query_values", DType::f8_e4m3, {c.index_heads, c.index_dim})),
      query_scale(buffers.query_output("query_scale", DType::f32, {c.index_heads})),
      of_keys{.x = keys.tensor(), .values = key_values.tensor(), .scale = key_scale.tensor()},
      of_queries{
          .x = queries.tensor(), .values = query_values.tensor(), .scale = query_scale.tensor()} {}

std::vector<Call> QuantizeFp8Work::calls() const { return {call(of_queries)}; }

}  // namespace winnow::harness
