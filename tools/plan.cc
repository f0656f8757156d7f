// SPDX-License-Identifier: Apache-2.0
// winnow plan: what the sparse attention of a model's training step costs over many ranks.
#include <algorithm>
#include <cmath>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "harness/step_plan.h"
#include "tools/commands.h"
#include "tools/table.h"
#include "tools/text.h"
#include "tools/words.h"
#include "winnow/winnow.h"

namespace winnow::tools {
namespace {

using harness::Cost;
using harness::PlannedCall;
using harness::PlannedLayer;
using harness::PlannedMessage;
using harness::PlanRequest;
using harness::StepPlan;

constexpr std::int64_t kMostTokens = std::int64_t{1} << 26;
constexpr int kMostRanks = 1 << 16;

struct Options {
  std::string model;
  std::vector<std::int64_t> tokens;
  std::vector<int> ranks;
  std::int64_t documents = 1;
  std::vector<std::int64_t> lengths;
  std::string gpu = "h200";
  double bandwidth = 50;  // GB/s
  std::string sharding = "zigzag";
  bool json = false;
};

std::vector<std::int32_t> offsets_of(const Options& options, std::int64_t tokens) {
  std::vector<std::int32_t> offsets{0};
  if (options.lengths.empty()) {
    if (options.documents > tokens)
      throw std::invalid_argument(
          fmt::format("--documents {}: must be at most {}, the tokens", options.documents, tokens));
    for (std::int64_t i = 1; i <= options.documents; ++i)
      offsets.push_back(static_cast<std::int32_t>(i * tokens / options.documents));
    return offsets;
  }
  std::int64_t sum = 0;
  for (const std::int64_t length : options.lengths) {
    sum += length;
    if (sum > tokens)
      throw std::invalid_argument(
          fmt::format("--lengths: must sum to at most {}, the tokens; the first {} sum to {}",
                      tokens, offsets.size(), sum));
    offsets.push_back(static_cast<std::int32_t>(sum));
  }
  return offsets;
}

PlanRequest request_of(const Options& options, std::int64_t tokens, int ranks) {
  if (!(options.bandwidth > 0) || std::isinf(options.bandwidth))
    throw std::invalid_argument(
        fmt::format("--bandwidth {}: must be GB/s, finite and more than 0", options.bandwidth));
  return {.model = harness::find_model(options.model),
          .cu_seqlens = offsets_of(options, tokens),
          .tokens = tokens,
          .ranks = ranks,
          .sharding = sharding_word(options.sharding),
          .gpu = harness::find_gpu(options.gpu),
          .bandwidth = options.bandwidth * 1e9};
}

std::string flops_text(double flops) {
  if (flops == 0) return "";
  if (flops < 1e12) return fmt::format("{:.3g} GFLOP", flops * 1e-9);
  return flops < 1e15 ? fmt::format("{:.4g} TFLOP", flops * 1e-12)
                      : fmt::format("{:.4g} PFLOP", flops * 1e-15);
}

/// What one call runs against.
harness::Bound bound_of(const PlannedCall& call, const harness::Gpu& gpu) {
  return call.memory_bytes(gpu) / gpu.memory_rate > call.flops / gpu.matrix_product
             ? harness::Bound::memory
             : harness::Bound::compute;
}

std::string message_text(const PlannedMessage& message) {
  return fmt::format("{} {}", message.backward ? "scatter_key_grads" : "gather_keys", message.keys);
}

void add_direction(Table& table, const PlannedLayer& layer, bool backward,
                   const PlanRequest& request) {
  for (const PlannedMessage& message : layer.plan.messages)
    if (message.backward == backward)
      table.add({message_text(message), "", "", bytes_text(message.bytes),
                 seconds_text(message.bytes / request.bandwidth), "network"});
  for (const PlannedCall& call : layer.plan.calls)
    if (call.backward == backward)
      table.add({std::string(call.name), flops_text(call.flops),
                 bytes_text(call.memory_bytes(request.gpu)), "",
                 seconds_text(call.seconds(request.gpu, layer.kind.c.name)),
                 std::string(name(bound_of(call, request.gpu)))});
}

void add_sum(Table& table, const std::string& what, const Cost& cost) {
  table.add(
      {what, flops_text(cost.flops), bytes_text(cost.memory_bytes), bytes_text(cost.network_bytes),
       seconds_text(cost.kernel_seconds + cost.network_seconds), std::string(name(cost.bound()))});
}

Table cost_table(const std::string& what) {
  return Table({"<" + what, "", "memory traffic", "network", "time", "<bound by"});
}

std::string documents_text(const PlanRequest& request) {
  const std::size_t documents = request.cu_seqlens.size() - 1;
  return fmt::format("{} tokens in {} document{}", request.tokens, documents,
                     documents == 1 ? "" : "s");
}

std::string beyond_measured_text(const harness::Gpu& gpu) {
  return fmt::format("Queries reach more keys than the {:.0f} measured: rates are assumed there.\n",
                     gpu.measured_keys);
}

void print_step(const PlanRequest& request, const StepPlan& step) {
  Table sums = cost_table("the step, all layers");
  add_sum(sums, "forward", step.forward);
  add_sum(sums, "backward", step.backward);
  add_sum(sums, "both", step.both());
  const Cost both = step.both();
  fmt::print("{}kernels {}, network {}; beside each other at best {}\n\n", sums.text(),
             seconds_text(both.kernel_seconds), seconds_text(both.network_seconds),
             seconds_text(step.overlapped_seconds));

  std::vector<std::string> headings{"<memory of a layer"};
  for (const PlannedLayer& layer : step.layers) headings.push_back(layer.kind.name);
  Table memory(headings);
  const auto add_row = [&](std::string_view what, const auto& bytes_of) {
    std::vector<std::string> cells{std::string(what)};
    for (const PlannedLayer& layer : step.layers)
      cells.push_back(bytes_text(bytes_of(layer.memory)));
    memory.add(std::move(cells));
  };
  const auto& longest =
      std::max_element(step.layers.begin(), step.layers.end(), [](const auto& a, const auto& b) {
        return a.memory.parts.size() < b.memory.parts.size();
      })->memory.parts;
  for (const auto& [part, bytes] : longest)
    add_row(part, [&](const harness::LayerMemory& each) { return each.of(part); });
  add_row("all", [](const harness::LayerMemory& each) { return each.total(); });
  fmt::print("{}\n", memory.text());

  const double capacity = request.gpu.memory_bytes;
  Table ways({"<memory of the step", "", "<"});
  const auto add_way = [&](const char* way, double bytes) {
    ways.add(
        {way, bytes_text(bytes),
         bytes > capacity ? fmt::format("more than the {} of the GPU", bytes_text(capacity)) : ""});
  };
  add_way("one layer: others are computed again in backward", step.one_layer_bytes);
  add_way("all layers, keys gathered again in backward", step.regathered_bytes);
  add_way("all layers, keys kept", step.kept_bytes);
  fmt::print(
      "{}\nindexer work of the busiest rank over the mean: contiguous {:.2f}, zigzag {:.2f}\n",
      ways.text(), step.contiguous_imbalance, step.zigzag_imbalance);
  if (step.beyond_measured) fmt::print("{}", beyond_measured_text(request.gpu));
}

void print_plan(const PlanRequest& request, const StepPlan& step, const Options& options) {
  std::int64_t layers = 0;
  for (const PlannedLayer& layer : step.layers) layers += layer.kind.layers;
  fmt::print("Sparse attention in one training step of {}, {}, over {} ranks, {}\n",
             request.model.name, documents_text(request), request.ranks, options.sharding);
  fmt::print("{} by its rates of {}; network of {:g} GB/s a rank each way\n", request.gpu.name,
             request.gpu.measured, options.bandwidth);
  fmt::print("figures of rank {}, the busiest, with {} rows\n\n", step.rank, step.rows);
  for (const PlannedLayer& layer : step.layers) {
    Table table =
        cost_table(fmt::format("{}: {} of {} layers", layer.kind.name, layer.kind.layers, layers));
    add_direction(table, layer, false, request);
    add_sum(table, "forward", layer.forward);
    add_direction(table, layer, true, request);
    add_sum(table, "backward", layer.backward);
    fmt::print("{}\n", table.text());
  }
  print_step(request, step);
}

/// One line for each of several plans.
void print_table(const std::vector<PlanRequest>& requests, const Options& options) {
  fmt::print("{} on {}, {:g} GB/s, {}\n", options.model, options.gpu, options.bandwidth,
             options.sharding);
  Table table({"tokens", "ranks", "rows", "FLOP", "kernels", "network", "at best", "<bound by",
               "gathered", "reduced", "one layer", "regathered", "kept", "contiguous", "zigzag"});
  bool beyond_measured = false;
  for (const PlanRequest& request : requests) {
    const StepPlan step = harness::plan_step(request);
    const Cost both = step.both();
    beyond_measured |= step.beyond_measured;
    table.add({fmt::to_string(request.tokens), fmt::to_string(request.ranks),
               fmt::to_string(step.rows), flops_text(both.flops), seconds_text(both.kernel_seconds),
               seconds_text(both.network_seconds), seconds_text(step.overlapped_seconds),
               std::string(name(both.bound())), bytes_text(step.forward.network_bytes),
               bytes_text(step.backward.network_bytes), bytes_text(step.one_layer_bytes),
               bytes_text(step.regathered_bytes), bytes_text(step.kept_bytes),
               fmt::format("{:.2f}", step.contiguous_imbalance),
               fmt::format("{:.2f}", step.zigzag_imbalance)});
  }
  fmt::print("{}", table.text());
  if (beyond_measured) fmt::print("{}", beyond_measured_text(requests[0].gpu));
}

using Json = nlohmann::ordered_json;

Json json_of(const Cost& cost) {
  return {{"flops", cost.flops},
          {"memory_bytes", cost.memory_bytes},
          {"network_bytes", cost.network_bytes},
          {"kernel_seconds", cost.kernel_seconds},
          {"network_seconds", cost.network_seconds},
          {"bound", name(cost.bound())}};
}

Json json_of(const PlannedLayer& layer, const harness::Gpu& gpu) {
  Json json{{"kind", layer.kind.name}, {"layers", layer.kind.layers}};
  for (const PlannedCall& call : layer.plan.calls)
    json["calls"].push_back({{"call", call.name},
                             {"flops", call.flops},
                             {"memory_bytes", call.memory_bytes(gpu)},
                             {"seconds", call.seconds(gpu, layer.kind.c.name)},
                             {"bound", name(bound_of(call, gpu))}});
  for (const PlannedMessage& message : layer.plan.messages)
    json["messages"].push_back({{"keys", message.keys},
                                {"call", message.backward ? "scatter_key_grads" : "gather_keys"},
                                {"bytes", message.bytes}});
  for (const auto& [part, bytes] : layer.memory.parts) json["memory"][part] = bytes;
  json["forward"] = json_of(layer.forward);
  json["backward"] = json_of(layer.backward);
  return json;
}

Json json_of(const PlanRequest& request, const Options& options) {
  const StepPlan step = harness::plan_step(request);
  Json layers = Json::array();
  for (const PlannedLayer& layer : step.layers) layers.push_back(json_of(layer, request.gpu));
  return {{"model", request.model.name},
          {"tokens", request.tokens},
          {"documents", request.cu_seqlens.size() - 1},
          {"ranks", request.ranks},
          {"sharding", options.sharding},
          {"gpu", request.gpu.name},
          {"rates_measured", request.gpu.measured},
          {"beyond_measured", step.beyond_measured},
          {"bandwidth", request.bandwidth},
          {"busiest_rank", step.rank},
          {"rows", step.rows},
          {"layers", layers},
          {"forward", json_of(step.forward)},
          {"backward", json_of(step.backward)},
          {"overlapped_seconds", step.overlapped_seconds},
          {"bound", name(step.both().bound())},
          {"memory",
           {{"gpu", request.gpu.memory_bytes},
            {"one_layer", step.one_layer_bytes},
            {"keys_regathered", step.regathered_bytes},
            {"keys_kept", step.kept_bytes}}},
          {"indexer_imbalance",
           {{"contiguous", step.contiguous_imbalance}, {"zigzag", step.zigzag_imbalance}}}};
}

void plan(const Options& options) {
  std::vector<PlanRequest> requests;
  for (const std::int64_t tokens : options.tokens)
    for (const int ranks : options.ranks) requests.push_back(request_of(options, tokens, ranks));
  if (options.json) {
    Json plans = Json::array();
    for (const PlanRequest& request : requests) plans.push_back(json_of(request, options));
    fmt::print("{}\n", Json{{"version", version()}, {"plans", plans}}.dump(2));
  } else if (requests.size() == 1) {
    print_plan(requests[0], harness::plan_step(requests[0]), options);
  } else {
    print_table(requests, options);
  }
}

}  // namespace

void add_plan(CLI::App& app, int&) {
  CLI::App* command = app.add_subcommand(
      "plan",
      "Sparse attention of a training step over many ranks, on paper: FLOPs, messages, memory.");
  auto options = std::make_shared<Options>();
  command->add_option("--model", options->model, "One of " + join(model_names()) + ".")->required();
  command
      ->add_option("--tokens", options->tokens,
                   "Rows of the packed batch. Several: one line for each instead of one plan.")
      ->required()
      ->delimiter(',')
      ->check(CLI::Range(std::int64_t{1}, kMostTokens))
      ->option_text("N,...");
  command->add_option("--ranks", options->ranks, "Of context parallelism. Several: likewise.")
      ->required()
      ->delimiter(',')
      ->check(CLI::Range(1, kMostRanks))
      ->option_text("N,...");
  CLI::Option* documents = command
                               ->add_option("--documents", options->documents,
                                            "Equal documents in the batch. Default: 1.")
                               ->check(CLI::Range(std::int64_t{1}, kMostTokens));
  command
      ->add_option("--lengths", options->lengths,
                   "Their lengths instead; rows behind the last one are padding.")
      ->delimiter(',')
      ->check(CLI::Range(std::int64_t{0}, kMostTokens))
      ->excludes(documents)
      ->option_text("N,...");
  command->add_option("--gpu", options->gpu, "Whose measured rates are taken. There is h200.");
  command
      ->add_option("--bandwidth", options->bandwidth,
                   "GB/s that a rank takes from others and gives to them at once. Default: 50, a "
                   "400 Gbit/s adapter for each GPU.")
      ->option_text("GB/S");
  command->add_option("--sharding", options->sharding,
                      "contiguous, or zigzag for equal causal work. Default: zigzag.");
  command->add_flag("--json", options->json, "Print JSON.");
  command->callback([options] { plan(*options); });
}

}  // namespace winnow::tools
