// SPDX-License-Identifier: Apache-2.0
// The figures of docs/performance.md from which plans are made, and what lies between them.
#include "harness/measured_rates.h"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <stdexcept>
#include <vector>

#include <fmt/format.h>

namespace winnow::harness {
namespace {

constexpr std::string_view kAnchor = "glm-5.2";

// Windows of index_topk end at the last key, so that a query reaches half of its own rows less than
// all keys. index_topk of 64 heads was measured once, for all models that have them.
constexpr MeasuredRate kOnH200[] = {
    {"index_topk_forward", "glm-5.2", 2048, 443},
    {"index_topk_forward", "glm-5.2", 30720, 682},
    {"index_topk_forward", "glm-5.2", 129024, 724},
    {"index_topk_forward", "deepseek-v3.2", 130048, 759},
    {"index_topk_forward", "deepseek-v4-flash", 130048, 759},
    {"index_topk_forward", "deepseek-v4-pro", 130048, 759},
    {"sparse_attention_forward", "glm-5.2", 4096, 633},
    {"sparse_attention_forward", "glm-5.2", 32768, 596},
    {"sparse_attention_forward", "glm-5.2", 131072, 546},
    {"sparse_attention_forward", "deepseek-v3.2", 4096, 641},
    {"sparse_attention_forward", "deepseek-v3.2", 32768, 612},
    {"sparse_attention_forward", "deepseek-v3.2", 131072, 588},
    {"sparse_attention_forward", "deepseek-v4-flash", 8192, 497},
    {"sparse_attention_forward", "deepseek-v4-pro", 32768, 561},
    {"sparse_attention_backward", "glm-5.2", 4096, 400},
    {"sparse_attention_backward", "glm-5.2", 8192, 398},
    {"sparse_attention_backward", "glm-5.2", 32768, 387},
    {"sparse_attention_backward", "glm-5.2", 131072, 206},
    {"sparse_attention_backward", "deepseek-v3.2", 8192, 397},
    {"sparse_attention_backward", "deepseek-v4-flash", 8192, 351},
    {"sparse_attention_backward", "deepseek-v4-flash", 32768, 285},
    {"sparse_attention_backward", "deepseek-v4-pro", 8192, 406},
    {"sparse_attention_backward", "deepseek-v4-pro", 32768, 383},
    {"value_projection_forward", "glm-5.2", 4096, 192},
    {"value_projection_backward", "glm-5.2", 4096, 159},
    {"index_target", "glm-5.2", 8192, 129},
    {"index_topk_backward", "glm-5.2", 8192, 54.4},
};

std::vector<MeasuredRate> curve(const Gpu& gpu, std::string_view call, std::string_view geometry) {
  std::vector<MeasuredRate> points;
  for (const MeasuredRate& each : gpu.rates)
    if (each.call == call && each.geometry == geometry) points.push_back(each);
  return points;
}

constexpr Gpu kH200{.name = "h200",
                    .measured = "2026-11-15",
                    .memory_bytes = 141e9,
                    .memory_rate = 4.23e12,
                    .cache_bytes = 50e6,
                    .matrix_product = 787e12,
                    .measured_keys = 131072,
                    .rates = kOnH200};

/// Flat outside.
double interpolated(const std::vector<MeasuredRate>& points, double keys) {
  assert(!points.empty());
  const auto above = std::find_if(points.begin(), points.end(),
                                  [&](const MeasuredRate& point) { return point.keys >= keys; });
  if (above == points.begin()) return points.front().teraflops;
  if (above == points.end()) return points.back().teraflops;
  const MeasuredRate& below = *(above - 1);
  const double share = std::log(keys / below.keys) / std::log(above->keys / below.keys);
  return std::lerp(below.teraflops, above->teraflops, share);
}

}  // namespace

const Gpu& find_gpu(std::string_view name) {
  if (name == kH200.name) return kH200;
  throw std::invalid_argument(fmt::format("no GPU '{}': measured was {}", name, kH200.name));
}

double measured_rate(const Gpu& gpu, std::string_view call, std::string_view geometry,
                     double keys) {
  const std::vector<MeasuredRate> anchor = curve(gpu, call, kAnchor);
  const std::vector<MeasuredRate> own = curve(gpu, call, geometry);
  if (own.empty()) return 1e12 * interpolated(anchor, keys);
  const double nearest = std::clamp(keys, own.front().keys, own.back().keys);
  return 1e12 * interpolated(own, nearest) * interpolated(anchor, keys) /
         interpolated(anchor, nearest);
}

}  // namespace winnow::harness
