// SPDX-License-Identifier: Apache-2.0
// Quantities and shapes as people read them.
#include "tools/text.h"

#include <array>
#include <string_view>

#include <fmt/format.h>

namespace winnow::tools {
namespace {

/// 1.23, 12.3, 123.
std::string three_digits(double value) {
  if (value >= 99.95) return fmt::format("{:.0f}", value);
  return fmt::format("{:.{}f}", value, value >= 9.995 ? 1 : 2);
}

/// The value in the largest of the units, each `step` times the one before, that keeps it above 1.
template <std::size_t n>
std::string with_unit(double value, double step, const std::array<std::string_view, n>& units) {
  std::size_t i = 0;
  for (; i + 1 < n && value >= 0.9995 * step; ++i) value /= step;
  return fmt::format("{} {}", three_digits(value), units[i]);
}

}  // namespace

std::string seconds_text(double seconds) {
  constexpr std::array<std::string_view, 3> units{"us", "ms", "s"};
  return with_unit(seconds * 1e6, 1000, units);
}

std::string bytes_text(double bytes) {
  constexpr std::array<std::string_view, 5> units{"B", "KiB", "MiB", "GiB", "TiB"};
  if (bytes < 1024) return fmt::format("{:.0f} B", bytes);
  return with_unit(bytes, 1024, units);
}

std::string rate_text(double flops_per_second) {
  constexpr std::array<std::string_view, 3> units{"MFLOP/s", "GFLOP/s", "TFLOP/s"};
  return with_unit(flops_per_second * 1e-6, 1000, units);
}

std::string attention_text(const harness::Case& c) {
  return fmt::format("{} heads, {} channels ({} of values), {} keys a query{}", c.heads, c.qk_dim,
                     c.v_dim, c.topk,
                     c.window > 0 ? fmt::format(", {} in a sliding window", c.window) : "");
}

std::string indexer_text(const harness::Case& c, bool with_keys) {
  const std::string keys = c.has_pools() ? fmt::format("pools of {} rows", c.ratio) : "keys";
  return fmt::format("{} heads, {} channels, {}", c.index_heads, c.index_dim,
                     with_keys ? fmt::format("{} of {} {}", c.index_topk(), c.index_keys(), keys)
                               : fmt::format("{} {} a query", c.index_topk(), keys));
}

}  // namespace winnow::tools
