// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>

#include "backend_operators.h"
#include "core/numerics.h"
#include "core/rows.h"
#include "core/threads.h"

namespace winnow::reference {
namespace {

constexpr float kMinAmax = 1e-4f;  // rows of zeros get a scale too

/// The smallest power of two that is at least x, for x > 0.
float round_up_to_power_of_two(float x) {
  int exponent = 0;
  const float fraction = std::frexp(x, &exponent);  // in [0.5, 1)
  return std::ldexp(1.0f, fraction == 0.5f ? exponent - 1 : exponent);
}

float scale_of(std::span<const double> x, bool power_of_two) {
  float amax = kMinAmax;
  for (const double value : x) {
    if (std::isfinite(value)) amax = std::max(amax, static_cast<float>(std::fabs(value)));
  }
  const float scale = amax / kFloat8Max;
  return power_of_two ? round_up_to_power_of_two(scale) : scale;
}

}  // namespace

std::size_t scratch_bytes(const QuantizeFp8& args, const Execution&) {
  return Scratch::bytes<double>(args.x.shape[args.x.rank - 1]);
}

void run(const QuantizeFp8& args, const Execution& execution) {
  const bool has_heads = args.x.rank == 3;
  const std::int64_t heads = has_heads ? args.x.shape[1] : 1;
  const std::int64_t dim = args.x.shape[args.x.rank - 1];
  parallel_for(execution, args.x.shape[0] * heads, scratch_bytes(args, execution),
               [&](std::int64_t i, Scratch scratch) {
                 const std::int64_t t = i / heads;
                 const std::int64_t h = i % heads;
                 const std::span<double> row = scratch.take<double>(dim);
                 has_heads ? read_row(args.x, {t, h}, row) : read_row(args.x, {t}, row);
                 const float scale = scale_of(row, args.power_of_two);
                 for (double& value : row) value = static_cast<float>(value) / scale;
                 has_heads ? write_row(args.values, {t, h}, row) : write_row(args.values, {t}, row);
                 has_heads ? write(args.scale, {t, h}, scale) : write(args.scale, {t}, scale);
               });
}

}  // namespace winnow::reference
