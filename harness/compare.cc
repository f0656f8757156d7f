// SPDX-License-Identifier: Apache-2.0
// The one comparison and all tolerances.
#include "harness/compare.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include <fmt/format.h>

#include "harness/numbers.h"

namespace winnow::harness {
namespace {

/// The limit for a type, from that for bf16: f16 keeps three bits more, but its gradients reach its
/// subnormal range and get two; f32 has a bound of its own.
double by_type(DType dtype, double bf16, double f16_share) {
  switch (dtype) {
    case DType::bf16:
      return bf16;
    case DType::f16:
      return bf16 * f16_share;
    default:
      return 1e-5;
  }
}

bool same(double actual, double expected) {
  return actual == expected || (std::isnan(actual) && std::isnan(expected));
}

template <class T>
Report compare_equal(std::string what, std::span<const T> actual, std::span<const T> expected) {
  Report report{.what = std::move(what)};
  if (actual.size() != expected.size()) {
    report.ok = false;
    report.note = fmt::format("{} elements, expected {}", actual.size(), expected.size());
    return report;
  }
  std::size_t wrong = 0;
  for (std::size_t i = 0; i < actual.size(); ++i) {
    if (same(actual[i], expected[i])) continue;
    if (wrong++ == 0)
      report.note = fmt::format("[{}] is {}, expected {}", i, actual[i], expected[i]);
  }
  if (wrong == 0) return report;
  report.ok = false;
  report.max = std::numeric_limits<double>::infinity();
  report.note += fmt::format("; {} of {} differ", wrong, actual.size());
  return report;
}

/// error / unit, where no error is no error in any unit.
double in_units(double error, double unit) { return error == 0 ? 0 : error / unit; }

double largest_finite(std::span<const double> values) {
  double largest = 0;
  for (const double value : values)
    if (std::isfinite(value)) largest = std::max(largest, std::abs(value));
  return largest;
}

/// |b| + share * sum, and a number so small that a result may be rounded to a subnormal one or to
/// 0.
std::vector<double> units_of(DType dtype, std::span<const double> expected,
                             std::span<const double> sums, double share) {
  std::vector<double> units(sums.begin(), sums.end());
  for (std::size_t i = 0; i < units.size(); ++i)
    units[i] = std::abs(expected[i]) + share * units[i] + smallest_normal(dtype);
  return units;
}

std::string number(double value) {
  // 3.1e-3 rather than 3.1e-03.
  std::string text = fmt::format("{:.1e}", value);
  const std::size_t zero = text.find("e-0");
  if (zero != std::string::npos) return text.erase(zero + 2, 1);
  const std::size_t plus = text.find("e+0");
  if (plus != std::string::npos) text.erase(plus + 1, 2);
  return text;
}

}  // namespace

std::string line(const Report& report) {
  if (report.skipped) return fmt::format("{:<30} skipped: {}", report.what, report.note);
  std::string text =
      fmt::format("{:<30} max {}  rms {}  limit {}  {}", report.what, number(report.max),
                  number(report.rms), number(report.limit), report.ok ? "ok" : "FAILED");
  if (!report.note.empty()) text += "  " + report.note;
  return text;
}

// The 4e-3 in norm and the 2^-8 by element of bf16 are one number here, the smaller.
Limit output_limit(DType dtype) { return {by_type(dtype, 0x1p-8, 0.125), true, true}; }
Limit lse_limit(DType dtype) { return {by_type(dtype, 1e-4, 1), true, false}; }
Limit gradient_limit(DType dtype) { return {by_type(dtype, 1e-2, 0.25), false, true}; }
Limit score_limit(DType dtype) { return {dtype == DType::f8_e4m3 ? 1e-3 : 1e-5, true, false}; }
// exp(s - lse) turns the absolute error of both into a relative one.
Limit target_limit(DType dtype) { return {by_type(dtype, 1e-3, 1), false, true}; }
Limit loss_limit(DType dtype) { return {by_type(dtype, 1e-3, 1), true, false}; }
Limit loss_gradient_limit() { return {1e-5, false, true}; }

Report compare(std::string what, std::span<const double> actual, std::span<const double> expected,
               const Limit& limit, std::span<const double> scale) {
  Report report{.what = std::move(what), .limit = limit.value};
  if (actual.size() != expected.size() || (!scale.empty() && scale.size() != expected.size())) {
    report.ok = false;
    report.note = fmt::format("{} elements, {} expected, {} units", actual.size(), expected.size(),
                              scale.size());
    return report;
  }
  const double common_unit = largest_finite(expected);
  double error_norm = 0;
  double norm = 0;
  std::size_t worst = 0;
  for (std::size_t i = 0; i < actual.size(); ++i) {
    const double a = actual[i];
    const double b = expected[i];
    if (!std::isfinite(a) || !std::isfinite(b)) {
      if (same(a, b)) continue;
      report.ok = false;
      if (report.note.empty()) report.note = fmt::format("[{}] is {}, expected {}", i, a, b);
      continue;
    }
    const double error = std::abs(a - b);
    const double units = in_units(error, scale.empty() ? common_unit : scale[i]);
    if (units > report.max) {
      report.max = units;
      worst = i;
    }
    error_norm += error * error;
    norm += b * b;
  }
  report.rms = in_units(std::sqrt(error_norm), std::sqrt(norm));
  const bool within =
      (!limit.on_max || report.max <= limit.value) && (!limit.on_rms || report.rms <= limit.value);
  if (!within && report.note.empty())
    report.note =
        fmt::format("worst [{}] is {}, expected {}", worst, actual[worst], expected[worst]);
  report.ok = report.ok && within;
  return report;
}

Report compare_exactly(std::string what, std::span<const double> actual,
                       std::span<const double> expected) {
  return compare_equal(std::move(what), actual, expected);
}

Report compare_exactly(std::string what, std::span<const std::int32_t> actual,
                       std::span<const std::int32_t> expected) {
  return compare_equal(std::move(what), actual, expected);
}

std::vector<double> at_least_one(std::span<const double> expected) {
  std::vector<double> units;
  units.reserve(expected.size());
  for (const double value : expected) units.push_back(std::max(1.0, std::abs(value)));
  return units;
}

std::vector<double> output_units(DType dtype, std::span<const double> expected,
                                 std::span<const double> sums) {
  return units_of(dtype, expected, sums, 1);
}

std::vector<double> product_units(DType dtype, std::span<const double> expected,
                                  std::span<const double> sums) {
  return units_of(dtype, expected, sums, 1e-5 / output_limit(dtype).value);
}

}  // namespace winnow::harness
