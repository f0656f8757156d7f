// SPDX-License-Identifier: Apache-2.0
#include "tools/compare/locate.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace winnow::dump {
namespace {

bool same(double a, double b) { return a == b || (std::isnan(a) && std::isnan(b)); }

Difference difference_at(std::size_t i, const std::vector<std::string_view>& names,
                         const harness::Shape& shape, const harness::Rows& rows, double value,
                         double expected) {
  Difference difference{{}, value, expected};
  auto rest = static_cast<std::int64_t>(i);
  for (std::size_t d = shape.size(); d-- > 0; rest /= shape[d]) {
    const std::int64_t at = rest % shape[d];
    const bool is_row = names[d] == "row" && !rows.empty();
    difference.at.emplace_back(names[d], is_row ? rows[static_cast<std::size_t>(at)] : at);
  }
  std::reverse(difference.at.begin(), difference.at.end());
  return difference;
}

}  // namespace

std::vector<std::string_view> dimension_names(const FormatField& field, std::size_t rank) {
  std::vector<std::string_view> names = field.dimensions;
  // Rows that are quantised may have heads; other tensors with one more dimension have a batch.
  const bool quantised = field.name == "x" || field.name == "values" || field.name == "scale";
  if (rank > names.size())
    names.insert(names.begin() + (quantised ? 1 : 0), quantised ? "head" : "batch");
  return names;
}

void locate(const FormatField& field, const harness::Shape& shape, const harness::Rows& rows,
            std::span<const double> actual, std::span<const double> expected,
            std::span<const double> units, Finding& finding) {
  if (actual.size() != expected.size()) return;  // the report says so
  const std::vector<std::string_view> names = dimension_names(field, shape.size());
  double common_unit = 0;
  for (const double value : expected)
    if (std::isfinite(value)) common_unit = std::max(common_unit, std::abs(value));
  double largest = 0;
  for (std::size_t i = 0; i < actual.size(); ++i) {
    if (same(actual[i], expected[i])) continue;
    const bool finite = std::isfinite(actual[i]) && std::isfinite(expected[i]);
    const double unit = units.empty() ? common_unit : units[i];
    const double error =
        finite ? std::abs(actual[i] - expected[i]) / unit : std::numeric_limits<double>::infinity();
    const auto here = [&] { return difference_at(i, names, shape, rows, actual[i], expected[i]); };
    if (error > largest) {
      largest = error;
      finding.most = here();
    }
    if (!finding.first && error > finding.report.limit) finding.first = here();
  }
}

}  // namespace winnow::dump
