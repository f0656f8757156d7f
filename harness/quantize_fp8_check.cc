// SPDX-License-Identifier: Apache-2.0
// The check of quantize_fp8: equal to the definition, worked out with the harness's own
// conversions.
#include <algorithm>
#include <cmath>

#include "harness/numbers.h"
#include "harness/quantize_fp8.h"
#include "harness/trial.h"

namespace winnow::harness {
namespace {

struct Quantized {
  std::vector<double> values;
  std::vector<double> scale;
};

float scale_of(std::span<const double> row, bool power_of_two) {
  float largest = 1e-4F;
  for (const double x : row)
    if (std::isfinite(x)) largest = std::max(largest, static_cast<float>(std::abs(x)));
  const float scale = largest / 448.0F;
  if (!power_of_two) return scale;
  int exponent = 0;
  const float mantissa = std::frexp(scale, &exponent);  // in [0.5, 1)
  return std::ldexp(1.0F, mantissa == 0.5F ? exponent - 1 : exponent);
}

Quantized quantized(std::span<const double> x, std::int64_t dim, bool power_of_two) {
  Quantized result;
  for (std::size_t first = 0; first < x.size(); first += dim) {
    const std::span<const double> row = x.subspan(first, dim);
    const float scale = scale_of(row, power_of_two);
    result.scale.push_back(scale);
    for (const double element : row)
      result.values.push_back(rounded(DType::f8_e4m3, static_cast<float>(element) / scale));
  }
  return result;
}

}  // namespace

std::vector<Report> check_quantize_fp8(const Case& c, const Execution& execution,
                                       std::uint64_t seed) {
  Trial trial(c, execution, seed);
  QuantizeFp8Work work(c, trial.tested(), seed);
  for (const bool power_of_two : {false, true}) {
    const std::string form = power_of_two ? ", power of two" : "";
    QuantizeFp8 of_keys = work.of_keys;
    QuantizeFp8 of_queries = work.of_queries;
    of_keys.power_of_two = of_queries.power_of_two = power_of_two;
    for (Buffer* output :
         {&work.key_values, &work.key_scale, &work.query_values, &work.query_scale})
      output->poison();
    if (!trial.run("keys" + form, of_keys) || !trial.run("queries" + form, of_queries)) continue;
    const Quantized keys = quantized(work.keys.download(), c.index_dim, power_of_two);
    const Quantized queries = quantized(trial.compared(work.queries), c.index_dim, power_of_two);
    trial.add(compare_exactly("keys" + form, work.key_values.download(), keys.values));
    trial.add(compare_exactly("scale of keys" + form, work.key_scale.download(), keys.scale));
    trial.add(compare_exactly("queries" + form, trial.compared(work.query_values), queries.values));
    trial.add(compare_exactly("scale of queries" + form, trial.compared(work.query_scale),
                              queries.scale));
  }
  trial.check_canaries(work.buffers);
  return trial.reports();
}

}  // namespace winnow::harness
