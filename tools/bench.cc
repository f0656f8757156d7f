// SPDX-License-Identifier: Apache-2.0
// winnow bench: how fast the calls of operators are, beside the machine's own matrix product.
#include <algorithm>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include "harness/backends.h"
#include "harness/families.h"
#include "tools/commands.h"
#include "tools/help.h"
#include "tools/json_document.h"
#include "tools/matrix_product.h"
#include "tools/output_file.h"
#include "tools/plan/rate_benches.h"
#include "tools/table.h"
#include "tools/text.h"
#include "tools/timed_calls.h"
#include "tools/whole_number.h"
#include "tools/words.h"
#include "winnow/winnow.h"

namespace winnow::tools {
namespace {

/// Sizes in which an operator is timed where neither an operator nor a case is asked for; others
/// are timed on their default case.
struct Size {
  std::string_view op;
  const char* name_of_case;
  std::int64_t keys = 0;    // 0: the case's
  std::int64_t tokens = 0;  // 0: as many as fit the time
};
constexpr Size kSizes[] = {
    {"index_topk", kDefaultCase, 4096},
    {"index_topk", kDefaultCase, 32768},
    {"sparse_attention", kDefaultCase},
    {"sparse_attention", kDefaultCaseWithWindow},
    {"dense_index_loss", kDefaultCase, 2048, 2048},
};

struct Options {
  std::string op;
  std::string name_of_case;
  std::string backend;
  std::string kernel;
  std::string slots = "ascending";
  std::string data = "iid";
  bool forward = false;
  bool backward = false;
  bool scaling = false;
  int threads = 0;
  int repeats = 5;
  std::uint64_t seed = 1;
  bool deterministic = false;
  bool even_documents = false;
  bool without_scores = false;
  std::int64_t limit_mib = 0;  // 0: the default of Execution
  std::optional<std::int64_t> tokens, keys, documents, heads, qk_dim, v_dim, topk, index_heads,
      index_dim;
  CLI::Option* json = nullptr;
  std::string json_file;   // empty: stdout
  std::string rates_file;  // not empty: the benches are those that plans need
};

harness::Case with_sizes(harness::Case c, const Options& options) {
  const std::pair<std::int64_t&, const std::optional<std::int64_t>&> sizes[] = {
      {c.tokens, options.tokens},       {c.rows, options.keys},
      {c.documents, options.documents}, {c.heads, options.heads},
      {c.qk_dim, options.qk_dim},       {c.v_dim, options.v_dim},
      {c.topk, options.topk},           {c.index_heads, options.index_heads},
      {c.index_dim, options.index_dim},
  };
  for (const auto& [size, asked] : sizes) size = asked.value_or(size);
  if (c.topk <= c.window)
    throw std::invalid_argument(
        fmt::format("--topk {}: must be more than {}, the window of {}", c.topk, c.window, c.name));
  c.scale = c.attention_scale();  // other dimensions may have no default
  c.slots = slots_word(options.slots);
  c.score_pattern = score_pattern_word(options.data);
  c.even_documents = options.even_documents;
  c.index_scores = !options.without_scores;
  return c;
}

Plan plan_of(std::string_view op, const harness::Case& c, const Options& options) {
  return {.op = op,
          .c = with_sizes(c, options),
          .choose_tokens = !options.tokens.has_value(),
          .scaling = options.scaling,
          .direction = options.forward == options.backward ? Direction::both
                       : options.forward                   ? Direction::forward
                                                           : Direction::backward,
          .repeats = options.repeats,
          .seed = options.seed};
}

std::vector<Plan> default_plans(const Options& options) {
  std::vector<Plan> plans;
  for (const std::string_view op : op_words("")) {
    const std::size_t before = plans.size();
    for (const Size& size : kSizes) {
      if (size.op != op) continue;
      harness::Case c = harness::find_case(size.name_of_case);
      if (size.keys > 0) c.rows = size.keys;
      c.tokens = size.tokens > 0 ? size.tokens : std::min(c.tokens, c.rows);
      Plan& plan = plans.emplace_back(plan_of(op, c, options));
      plan.choose_tokens = plan.choose_tokens && size.tokens == 0;
    }
    if (plans.size() == before) plans.push_back(plan_of(op, case_word("", op), options));
  }
  return plans;
}

/// The plans for all ops asked for, if the case has them.
std::vector<Plan> plans_of(const Options& options) {
  std::vector<Plan> plans;
  if (!options.rates_file.empty()) {
    for (const plan::RateBench& each : plan::rate_benches(options.keys))
      plans.push_back(plan_of(each.op, each.c, options));
    return plans;
  }
  if (options.op.empty() && options.name_of_case.empty()) return default_plans(options);
  for (const std::string_view op : op_words(options.op)) {
    const bool may_lack = options.op.empty();
    if (may_lack && !harness::missing(op, harness::find_case(options.name_of_case)).empty())
      continue;
    plans.push_back(plan_of(op, case_word(options.name_of_case, op), options));
  }
  return plans;
}

std::vector<std::string_view> ops_of(const std::vector<Plan>& plans) {
  std::vector<std::string_view> ops;
  for (const Plan& plan : plans) ops.push_back(plan.op);
  return ops;
}

struct Results {
  Execution execution;
  std::optional<MatrixProduct> product;
  std::optional<MatrixProduct> one_thread_product;  // with --scaling
  std::vector<Measured> measured;
};

/// How many times faster all threads are than one; empty if that was not measured.
std::string scaling_text(const Measured& each) {
  return each.one_thread ? fmt::format("{:.2f}", each.one_thread->median / each.timing.median) : "";
}

/// The product is taken again before each op, so that one slow moment does not count for all.
std::optional<MatrixProduct> middle_one(std::vector<MatrixProduct> products) {
  if (products.empty()) return std::nullopt;
  const auto middle = products.begin() + static_cast<std::ptrdiff_t>(products.size() / 2);
  std::nth_element(products.begin(), middle, products.end(), [](const auto& a, const auto& b) {
    return a.flops_per_second < b.flops_per_second;
  });
  return *middle;
}

Results measure_all(const std::vector<Plan>& plans, const Execution& execution) {
  Results results{.execution = execution, .product = {}, .one_thread_product = {}, .measured = {}};
  const Device device = harness::device_of(execution.backend);
  std::vector<MatrixProduct> products, one_thread_products;
  Progress progress(static_cast<double>(plans.size()));
  for (const Plan& plan : plans) {
    progress.begin("matrix product", 0);
    if (auto product = matrix_product(device, thread_count(execution)))
      products.push_back(std::move(*product));
    if (plan.scaling && one_thread_products.size() < 3)
      if (auto product = matrix_product(device, 1))
        one_thread_products.push_back(std::move(*product));
    for (Measured& each : benchmark(plan, execution, progress))
      results.measured.push_back(std::move(each));
  }
  results.product = middle_one(std::move(products));
  results.one_thread_product = middle_one(std::move(one_thread_products));
  return results;
}

/// Of one case.
void print_table(const std::vector<Measured>& measured, const Results& results) {
  const harness::Case& c = measured.front().c;
  const bool scaling = std::any_of(measured.begin(), measured.end(), [](const Measured& each) {
    return each.one_thread.has_value();
  });
  fmt::print("\n{}, {}\n  attention: {}\n  indexer: {}\n\n", c.name, name(c.dtype),
             attention_text(c), indexer_text(c, /*with_keys=*/false));
  Table table({"<call", "<kernel", "queries", "keys", "time", "speed", "of product", "workspace",
               scaling ? "scaling" : ""});
  for (const Measured& each : measured) {
    const std::string queries = fmt::to_string(each.c.tokens);
    const std::string keys = fmt::to_string(each.c.keys());
    if (!each.why_not.empty()) {
      table.add({each.call, "-", queries, keys, "-", "", "", "", ""});
      continue;
    }
    const double rate = each.flops / each.timing.median;
    const double product = results.product ? results.product->flops_per_second : 0;
    table.add({each.call, each.kernel, queries, keys, seconds_text(each.timing.median),
               each.flops > 0 ? rate_text(rate) : "",
               each.flops > 0 && product > 0 ? fmt::format("{:.3f}", rate / product) : "",
               bytes_text(static_cast<double>(each.workspace_bytes)), scaling_text(each)});
  }
  fmt::print("{}", table.text());
  for (const Measured& each : measured)
    if (!each.why_not.empty()) fmt::print("{}: {}\n", each.call, each.why_not);
}

std::string product_text(const Results& results) {
  if (!results.product) return "unknown";
  const double rate = results.product->flops_per_second;
  std::string text = fmt::format("{}, {}", rate_text(rate), results.product->what);
  if (results.one_thread_product)
    text += fmt::format(", scaling {:.2f}", rate / results.one_thread_product->flops_per_second);
  return text;
}

void print_text(const Results& results) {
  const Backend backend = results.execution.backend;
  fmt::print("backend         {}: {}\n", name(backend), describe(backend));
  fmt::print("matrix product  {}\n", product_text(results));
  for (std::vector<Measured> left = results.measured; !left.empty();) {
    const harness::Case c = left.front().c;
    const auto others = std::stable_partition(
        left.begin(), left.end(), [&](const Measured& each) { return each.c.name == c.name; });
    print_table({left.begin(), others}, results);
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
    json["kernel"] = each.kernel;
    json["median_seconds"] = each.timing.median;
    json["fastest_seconds"] = each.timing.fastest;
    json["slowest_seconds"] = each.timing.slowest;
    json["repeats"] = each.timing.repeats;
    json["workspace_bytes"] = each.workspace_bytes;
    if (each.one_thread) {
      json["one_thread_median_seconds"] = each.one_thread->median;
      json["scaling"] = each.one_thread->median / each.timing.median;
    }
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
  if (results.product && results.one_thread_product)
    product["one_thread_flops_per_second"] = results.one_thread_product->flops_per_second;
  return {{"backend", name(results.execution.backend)},
          {"runs_on", describe(results.execution.backend)},
          {"threads", thread_count(results.execution)},
          {"slots", options.slots},
          {"data", options.data},
          {"matrix_product", std::move(product)},
          {"measured", std::move(measured)}};
}

void bench(const Options& options) {
  const Backend backend = backend_word(options.backend);
  if (options.scaling && harness::device_of(backend).kind != DeviceKind::cpu)
    throw std::invalid_argument(
        fmt::format("--scaling: is for backends on the CPU, which {} is not", name(backend)));
  const std::vector<Plan> plans = plans_of(options);
  Execution execution{.backend = backend, .threads = options.threads};
  execution.kernel = kernel_word(options.kernel, ops_of(plans), {backend});
  execution.deterministic = options.deterministic;
  if (options.limit_mib > 0)
    execution.workspace_limit = static_cast<std::size_t>(options.limit_mib) << 20;
  OutputFile file(options.json_file);
  OutputFile rates_file(options.rates_file);
  const Results results = measure_all(plans, execution);
  if (options.backward && results.measured.empty())
    throw std::invalid_argument(
        fmt::format("--backward: {} has no backward calls", fmt::join(ops_of(plans), ", ")));
  if (rates_file.is_open())
    rates_file.write(rates_text(
        plan::measured_rates(options.rates_file, execution, results.product, results.measured)));
  const bool json = options.json->count() > 0;
  if (file.is_open()) file.write(json_text("bench", json_of(results, options)));
  if (json && !file.is_open())
    print_json("bench", json_of(results, options));
  else
    print_text(results);
  file.close();
  rates_file.close();
}

}  // namespace

void add_bench(CLI::App& app, int&) {
  CLI::App* command = app.add_subcommand(
      "bench", "Median times of operators, beside the machine's own matrix product.");
  auto options = std::make_shared<Options>();
  command->add_option(
      "OP", options->op,
      "One of " + join(op_words("")) + ". Default: all; without a case, some in several sizes.");
  command->add_option("--case", options->name_of_case, case_help());
  command->add_option("--backend", options->backend,
                      "One of " + join(backend_names()) + ". Default: the fastest here.");
  command->add_option("--kernel", options->kernel, kKernelHelp);
  command->add_flag("--forward", options->forward, "Only forward calls.");
  command->add_flag("--backward", options->backward, "Only backward calls.");
  command->add_option(
      "--slots", options->slots,
      "Index lists: ascending, shuffled, neighbours (a row keeps nine of ten keys of the row "
      "before) or selected (as an indexer over a smooth sequence selects them). "
      "Default: ascending.");
  command->add_option(
      "--data", options->data,
      "What the indexer's scores look like: " + join(score_pattern_names()) + ". Default: iid.");
  command->add_option("--threads", options->threads, "Of the CPU. Default: all.")
      ->transform(whole_number(1, 1024));
  command->add_flag("--scaling", options->scaling,
                    "Every call on one thread too; prints how many times faster all are.");
  command
      ->add_option("--repeat", options->repeats,
                   "Timed samples of each call, at least 3. Default: 5.")
      ->transform(whole_number(3, 1000));
  options->json = command->add_option("--json", options->json_file,
                                      "Print JSON, or print text and write JSON to FILE.");
  options->json->expected(0, 1)->option_text("[FILE]");

  command->add_flag("--deterministic", options->deterministic,
                    "Backward calls give the same bits in every run.");
  command->add_flag("--without-scores", options->without_scores,
                    "index_topk returns indices and lengths alone.");
  command->add_flag("--even-documents", options->even_documents,
                    "The documents of --documents have one length.");
  command->add_option("--limit", options->limit_mib, "The workspace limit in MiB. Default: 256.")
      ->transform(whole_number(std::int64_t{1}, std::int64_t{1} << 20));

  const auto size = [&](const char* name, std::optional<std::int64_t>& value, const char* what,
                        std::int64_t most = (std::int64_t{1} << 31) - 1) {
    command->add_option(name, value, what)
        ->transform(whole_number(std::int64_t{1}, most))
        ->group("Sizes instead of the case's");
  };
  size("--tokens", options->tokens, "Query rows. Default: at most the case's, as time allows.");
  size("--keys", options->keys, "Rows of the batch that are keys; pools come on top.");
  size("--documents", options->documents,
       "Documents in the batch, of uneven length; one is empty.");
  size("--heads", options->heads, "Of attention.");
  size("--qk-dim", options->qk_dim, "Channels of q and kv.");
  size("--v-dim", options->v_dim, "Channels of values.");
  size("--topk", options->topk, "Slots of attention; a sliding window is a part of them.",
       std::int64_t{1} << 30);
  size("--index-heads", options->index_heads, "Of the indexer.");
  size("--index-dim", options->index_dim, "Channels of the indexer.");

  const std::vector<std::string> of_rates{"--help", "--backend", "--threads", "--repeat",
                                          "--json", "--tokens",  "--keys"};
  const std::vector<CLI::Option*> others = command->get_options([&](const CLI::Option* each) {
    return std::find(of_rates.begin(), of_rates.end(), each->get_name()) == of_rates.end();
  });
  CLI::Option* rates = command->add_option("--rates", options->rates_file,
                                           "Time what plan needs, and write it for plan --rates.");
  rates->option_text("FILE");
  for (CLI::Option* each : others) rates->excludes(each);
  add_examples(*command,
               {"bench", "bench sparse_attention --case glm-5.2 --backend cpu --forward",
                "bench index_topk --keys 32768 --json bench.json", "bench --rates rates.json"});
  command->callback([options] { bench(*options); });
}

}  // namespace winnow::tools
