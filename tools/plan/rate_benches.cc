// SPDX-License-Identifier: Apache-2.0
// The list of benches for plans, and how their results become rates.
#include "tools/plan/rate_benches.h"

#include <algorithm>
#include <ctime>
#include <filesystem>
#include <stdexcept>

#include <fmt/chrono.h>
#include <fmt/format.h>

#include "harness/backends.h"
#include "tools/plan/device_limits.h"

namespace winnow::plan {
namespace {

using tools::Measured;

struct Listed {
  std::string_view op;
  std::string_view model;
  std::int64_t rows;
};
// Pools of 4 rows come on top of the rows: 6554 rows are 8192 keys of attention, and 524288 rows
// are 131072 keys of the indexer.
constexpr Listed kBenches[] = {
    {"index_topk", "glm-5.2", 4096},
    {"index_topk", "glm-5.2", 32768},
    {"index_topk", "glm-5.2", 131072},
    {"index_topk", "deepseek-v3.2", 131072},
    {"index_topk", "deepseek-v4-flash", 524288},
    {"index_topk", "deepseek-v4-pro", 524288},
    {"sparse_attention", "glm-5.2", 4096},
    {"sparse_attention", "glm-5.2", 8192},
    {"sparse_attention", "glm-5.2", 32768},
    {"sparse_attention", "glm-5.2", 131072},
    {"sparse_attention", "deepseek-v3.2", 4096},
    {"sparse_attention", "deepseek-v3.2", 32768},
    {"sparse_attention", "deepseek-v3.2", 131072},
    {"sparse_attention", "deepseek-v4-flash", 6554},
    {"sparse_attention", "deepseek-v4-flash", 26214},
    {"sparse_attention", "deepseek-v4-pro", 6554},
    {"sparse_attention", "deepseek-v4-pro", 26214},
    {"value_projection", "glm-5.2", 4096},
    {"index_target", "glm-5.2", 8192},
};

/// Keys that a query can reach, on average. Windows of index_topk end at the query's own row, and
/// the queries are the last rows; lists of other calls are drawn from all keys.
double reached_keys(const Measured& each) {
  const harness::Case& c = each.c;
  const auto index_keys = static_cast<double>(c.index_keys());
  if (each.call.starts_with("index_topk"))
    return index_keys - static_cast<double>(c.tokens) / (2 * c.ratio);
  return each.call == "index_target" ? index_keys : static_cast<double>(c.keys());
}

/// The command that measures this call alone.
std::string command_of(const Measured& each, const Execution& execution) {
  std::string words = each.call;
  for (const char* direction : {"forward", "backward"})
    if (words.ends_with(fmt::format("_{}", direction))) words.replace(words.rfind('_'), 1, " --");
  return fmt::format("winnow bench {} --case {} --backend {}{} --tokens {} --keys {} --repeat {}",
                     words, each.c.name, name(execution.backend),
                     execution.threads > 0 ? fmt::format(" --threads {}", execution.threads) : "",
                     each.c.tokens, each.c.rows, each.timing.repeats);
}

}  // namespace

std::vector<RateBench> rate_benches(std::optional<std::int64_t> keys) {
  std::vector<RateBench> benches;
  for (const Listed& each : kBenches) {
    RateBench bench{each.op, harness::find_case(each.model)};
    bench.c.rows = keys.value_or(each.rows);
    bench.c.tokens = std::min(bench.c.tokens, bench.c.rows);
    const bool known = std::any_of(benches.begin(), benches.end(), [&](const RateBench& other) {
      return other.op == bench.op && other.c.name == bench.c.name && other.c.rows == bench.c.rows;
    });
    if (!known) benches.push_back(std::move(bench));
  }
  return benches;
}

DeviceRates measured_rates(const std::string& file, const Execution& execution,
                           const std::optional<tools::MatrixProduct>& product,
                           const std::vector<Measured>& measured) {
  if (!product)
    throw std::runtime_error("--rates: the matrix product is unknown without OpenBLAS or cuBLAS");
  const DeviceLimits limits =
      device_limits(harness::device_of(execution.backend), tools::thread_count(execution));
  const Origin origin{.device = describe(execution.backend),
                      .date = fmt::format("{:%Y-%m-%d}", fmt::gmtime(std::time(nullptr))),
                      .command = "winnow bench --rates"};
  DeviceRates rates{.name = std::filesystem::path(file).stem(),
                    .memory_bytes = limits.memory_bytes,
                    .cache_bytes = limits.cache_bytes,
                    .memory_rate = {limits.copy_rate, origin},
                    .matrix_product = {product->flops_per_second, origin},
                    .calls = {}};
  for (const Measured& each : measured) {
    const auto rated = rated_calls();
    if (std::find(rated.begin(), rated.end(), each.call) == rated.end()) continue;
    if (!each.why_not.empty()) throw std::runtime_error("--rates: " + each.why_not);
    rates.calls.push_back({.call = each.call,
                           .model = each.c.name,
                           .keys = reached_keys(each),
                           .teraflops = each.flops / each.timing.median * 1e-12,
                           .origin = {origin.device, origin.date, command_of(each, execution)}});
  }
  return rates;
}

}  // namespace winnow::plan
