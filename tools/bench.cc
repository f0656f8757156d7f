// SPDX-License-Identifier: Apache-2.0
// winnow bench: how fast the calls of operators are, beside the machine's own matrix product.
#include <algorithm>
#include <fstream>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "harness/backends.h"
#include "harness/workloads.h"
#include "tools/benchmark.h"
#include "tools/commands.h"
#include "tools/matrix_product.h"
#include "tools/table.h"
#include "tools/text.h"
#include "tools/words.h"
#include "winnow/winnow.h"

namespace winnow::tools {
namespace {

constexpr char kDefaultCase[] = "glm-5.2";
constexpr char kDefaultCaseWithWindow[] = "deepseek-v4-flash";

struct Options {
  std::string op;
  std::string name_of_case;
  std::string backend;
  std::string slots = "ascending";
  bool forward = false;
  bool backward = false;
  int threads = 0;
  int repeats = 5;
  std::uint64_t seed = 1;
  std::optional<std::int64_t> tokens, keys, heads, qk_dim, v_dim, topk, index_heads, index_dim;
  CLI::Option* json = nullptr;
  std::string json_file;  // empty: stdout
};

harness::Case with_sizes(harness::Case c, const Options& options) {
  const std::pair<std::int64_t&, const std::optional<std::int64_t>&> sizes[] = {
      {c.tokens, options.tokens},
      {c.rows, options.keys},
      {c.heads, options.heads},
      {c.qk_dim, options.qk_dim},
      {c.v_dim, options.v_dim},
      {c.topk, options.topk},
      {c.index_heads, options.index_heads},
      {c.index_dim, options.index_dim},
  };
  for (const auto& [size, asked] : sizes) size = asked.value_or(size);
  if (c.topk <= c.window)
    throw std::invalid_argument(
        fmt::format("--topk {}: must be more than {}, the window of {}", c.topk, c.window, c.name));
  c.scale = c.attention_scale();  // other dimensions may have no default
  c.slots = slots_word(options.slots);
  return c;
}

/// The plans for all ops asked for; without a case each op gets one that has it.
std::vector<Plan> plans_of(const Options& options) {
  std::vector<Plan> plans;
  for (const std::string_view op : op_words(options.op)) {
    const bool any_case = options.name_of_case.empty();
    const harness::Case* c =
        &harness::find_case(any_case ? kDefaultCase : options.name_of_case.c_str());
    if (any_case && !harness::missing(op, *c).empty())
      c = &harness::find_case(kDefaultCaseWithWindow);
    const std::string reason = harness::missing(op, *c);
    if (!reason.empty() && !options.op.empty()) throw std::invalid_argument(reason);
    if (!reason.empty()) continue;
    plans.push_back({.op = op,
                     .c = with_sizes(*c, options),
                     .choose_tokens = !options.tokens.has_value(),
                     .direction = options.forward == options.backward ? Direction::both
                                  : options.forward                   ? Direction::forward
                                                                      : Direction::backward,
                     .repeats = options.repeats,
                     .seed = options.seed});
  }
  return plans;
}

struct Results {
  Backend backend{};
  std::optional<MatrixProduct> product;
  std::vector<Measured> measured;
};

int thread_count(const Options& options) {
  return options.threads > 0 ? options.threads
                             : static_cast<int>(std::thread::hardware_concurrency());
}

/// The product is taken again before each op, so that one slow moment does not count for all.
Results measure_all(const std::vector<Plan>& plans, const Options& options, Backend backend) {
  Results results{.backend = backend, .product = {}, .measured = {}};
  std::vector<MatrixProduct> products;
  Progress progress(static_cast<double>(plans.size()));
  for (const Plan& plan : plans) {
    progress.begin("matrix product", 0);
    if (auto product = matrix_product(harness::device_of(backend), thread_count(options)))
      products.push_back(std::move(*product));
    for (Measured& each :
         benchmark(plan, {.backend = backend, .threads = options.threads}, progress))
      results.measured.push_back(std::move(each));
  }
  if (products.empty()) return results;
  const auto middle = products.begin() + static_cast<std::ptrdiff_t>(products.size() / 2);
  std::nth_element(products.begin(), middle, products.end(), [](const auto& a, const auto& b) {
    return a.flops_per_second < b.flops_per_second;
  });
  results.product = *middle;
  return results;
}

/// Of one case.
void print_table(const std::vector<Measured>& measured,
                 const std::optional<MatrixProduct>& product) {
  const harness::Case& c = measured.front().c;
  fmt::print("\n{}, {}: {} keys\n  attention: {}\n  indexer: {}\n\n", c.name, name(c.dtype),
             c.keys(), attention_text(c), indexer_text(c));
  Table table({"<call", "queries", "time", "speed", "of product", "workspace"});
  for (const Measured& each : measured) {
    if (!each.why_not.empty()) {
      table.add({each.call, fmt::to_string(each.c.tokens), "-", "", "", ""});
      continue;
    }
    const double rate = each.flops / each.timing.median;
    table.add(
        {each.call, fmt::to_string(each.c.tokens), seconds_text(each.timing.median),
         each.flops > 0 ? rate_text(rate) : "",
         each.flops > 0 && product ? fmt::format("{:.3f}", rate / product->flops_per_second) : "",
         bytes_text(static_cast<double>(each.workspace_bytes))});
  }
  fmt::print("{}", table.text());
  for (const Measured& each : measured)
    if (!each.why_not.empty()) fmt::print("{}: {}\n", each.call, each.why_not);
}

void print_text(const Results& results) {
  fmt::print("backend         {}: {}\n", name(results.backend), describe(results.backend));
  fmt::print("matrix product  {}\n",
             results.product ? fmt::format("{}, {}", rate_text(results.product->flops_per_second),
                                           results.product->what)
                             : "unknown");
  for (std::vector<Measured> left = results.measured; !left.empty();) {
    const harness::Case c = left.front().c;
    const auto others = std::stable_partition(
        left.begin(), left.end(), [&](const Measured& each) { return each.c.name == c.name; });
    print_table({left.begin(), others}, results.product);
    left.erase(left.begin(), others);
  }
}

nlohmann::ordered_json json_of(const Results& results, const Options& options) {
  using Json = nlohmann::ordered_json;
  Json measured = Json::array();
  for (const Measured& each : results.measured) {
    Json& json = measured.emplace_back(Json{{"call", each.call},
                                            {"case", each.c.name},
                                            {"tokens", each.c.tokens},
                                            {"keys", each.c.keys()},
                                            {"heads", each.c.heads},
                                            {"qk_dim", each.c.qk_dim},
                                            {"v_dim", each.c.v_dim},
                                            {"topk", each.c.topk},
                                            {"index_heads", each.c.index_heads},
                                            {"index_dim", each.c.index_dim},
                                            {"dtype", name(each.c.dtype)}});
    if (!each.why_not.empty()) {
      json["why_not"] = each.why_not;
      continue;
    }
    json["median_seconds"] = each.timing.median;
    json["fastest_seconds"] = each.timing.fastest;
    json["slowest_seconds"] = each.timing.slowest;
    json["repeats"] = each.timing.repeats;
    json["workspace_bytes"] = each.workspace_bytes;
    if (each.flops == 0) continue;
    json["flops"] = each.flops;
    json["flops_per_second"] = each.flops / each.timing.median;
    if (results.product)
      json["of_matrix_product"] =
          each.flops / each.timing.median / results.product->flops_per_second;
  }
  Json product;  // null: unknown
  if (results.product)
    product = {{"flops_per_second", results.product->flops_per_second},
               {"what", results.product->what}};
  return {{"version", version()},
          {"backend", name(results.backend)},
          {"runs_on", describe(results.backend)},
          {"threads", thread_count(options)},
          {"slots", options.slots},
          {"matrix_product", std::move(product)},
          {"measured", std::move(measured)}};
}

void bench(const Options& options) {
  const Backend backend = backend_word(options.backend);
  const std::vector<Plan> plans = plans_of(options);
  std::ofstream file;
  if (!options.json_file.empty()) {
    file.open(options.json_file);
    if (!file) throw std::runtime_error(fmt::format("cannot write '{}'", options.json_file));
  }
  const Results results = measure_all(plans, options, backend);
  const bool json = options.json->count() > 0;
  if (file.is_open()) file << json_of(results, options).dump(2) << '\n';
  if (json && !file.is_open())
    fmt::print("{}\n", json_of(results, options).dump(2));
  else
    print_text(results);
}

}  // namespace

void add_bench(CLI::App& app, int&) {
  CLI::App* command = app.add_subcommand(
      "bench", "Median times of operators, beside the machine's own matrix product.");
  auto options = std::make_shared<Options>();
  command->add_option("OP", options->op, "One of " + join(op_words("")) + ". Default: all.");
  command->add_option("--case", options->name_of_case,
                      fmt::format("One of {} or any other case of check. Default: {}, or {} where "
                                  "that lacks the operator.",
                                  join(model_names()), kDefaultCase, kDefaultCaseWithWindow));
  command->add_option("--backend", options->backend,
                      "One of " + join(backend_names()) + ". Default: the fastest here.");
  command->add_flag("--forward", options->forward, "Only forward calls.");
  command->add_flag("--backward", options->backward, "Only backward calls.");
  command->add_option("--slots", options->slots,
                      "Index lists: ascending, shuffled, or neighbours (rows share most keys). "
                      "Default: ascending.");
  command->add_option("--threads", options->threads, "Of the CPU. Default: all.")
      ->check(CLI::Range(1, 1024));
  command
      ->add_option("--repeat", options->repeats,
                   "Timed samples of each call, at least 3. Default: 5.")
      ->check(CLI::Range(3, 1000));
  options->json = command->add_option("--json", options->json_file,
                                      "Print JSON, or print text and write JSON to FILE.");
  options->json->expected(0, 1)->option_text("[FILE]");

  const auto size = [&](const char* name, std::optional<std::int64_t>& value, const char* what) {
    command->add_option(name, value, what)
        ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 31))
        ->group("Sizes instead of the case's");
  };
  size("--tokens", options->tokens, "Query rows. Default: at most the case's, as time allows.");
  size("--keys", options->keys, "Rows of the batch that are keys; pools come on top.");
  size("--heads", options->heads, "Of attention.");
  size("--qk-dim", options->qk_dim, "Channels of q and kv.");
  size("--v-dim", options->v_dim, "Channels of values.");
  size("--topk", options->topk, "Slots of attention; a sliding window is a part of them.");
  size("--index-heads", options->index_heads, "Of the indexer.");
  size("--index-dim", options->index_dim, "Channels of the indexer.");
  command->callback([options] { bench(*options); });
}

}  // namespace winnow::tools
