// SPDX-License-Identifier: Apache-2.0
// Plans as text on stdout and as JSON.
#include "tools/plan/report.h"

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>

#include <fmt/format.h>

#include "tools/table.h"
#include "tools/text.h"
#include "tools/words.h"

namespace winnow::plan {
namespace {

using tools::bytes_text;
using tools::seconds_text;
using tools::Table;
using Json = nlohmann::ordered_json;

std::string flops_text(double flops) {
  if (flops == 0) return "";
  if (flops < 1e12) return fmt::format("{:.3g} GFLOP", flops * 1e-9);
  return flops < 1e15 ? fmt::format("{:.4g} TFLOP", flops * 1e-12)
                      : fmt::format("{:.4g} PFLOP", flops * 1e-15);
}

void add_direction(Table& table, const PlannedLayer& layer, bool backward,
                   const PlanRequest& request) {
  for (const PlannedMessage& message : layer.plan.messages)
    if (message.backward == backward)
      table.add({fmt::format("{} {}", message.call(), message.keys), "", "",
                 bytes_text(message.bytes), seconds_text(message.bytes / request.bandwidth),
                 "network"});
  for (const PlannedCall& call : layer.plan.calls)
    if (call.backward == backward)
      table.add({std::string(call.name), flops_text(call.flops),
                 bytes_text(call.memory_bytes(request.device)), "",
                 seconds_text(call.seconds(request.device, layer.kind.c.name)),
                 std::string(name(call.bound(request.device)))});
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

std::string beyond_measured_text(const DeviceRates& device) {
  return fmt::format("Queries reach more keys than the {:.0f} measured: rates are assumed there.\n",
                     device.most_keys());
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
    add_row(part, [&](const LayerMemory& each) { return each.of(part); });
  add_row("all", [](const LayerMemory& each) { return each.total(); });
  fmt::print("{}\n", memory.text());

  const double capacity = request.device.memory_bytes;
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
  if (step.beyond_measured) fmt::print("{}", beyond_measured_text(request.device));
}

Json json_of(const Cost& cost) {
  return {{"flops", cost.flops},
          {"memory_bytes", cost.memory_bytes},
          {"network_bytes", cost.network_bytes},
          {"kernel_seconds", cost.kernel_seconds},
          {"network_seconds", cost.network_seconds},
          {"bound", name(cost.bound())}};
}

Json json_of(const PlannedLayer& layer, const DeviceRates& device) {
  Json json{{"kind", layer.kind.name}, {"layers", layer.kind.layers}};
  for (const PlannedCall& call : layer.plan.calls)
    json["calls"].push_back({{"call", call.name},
                             {"flops", call.flops},
                             {"memory_bytes", call.memory_bytes(device)},
                             {"seconds", call.seconds(device, layer.kind.c.name)},
                             {"bound", name(call.bound(device))}});
  for (const PlannedMessage& message : layer.plan.messages)
    json["messages"].push_back(
        {{"keys", message.keys}, {"call", message.call()}, {"bytes", message.bytes}});
  for (const auto& [part, bytes] : layer.memory.parts) json["memory"][part] = bytes;
  json["forward"] = json_of(layer.forward);
  json["backward"] = json_of(layer.backward);
  return json;
}

}  // namespace

void print_plan(const Planned& planned) {
  const auto& [request, step] = planned;
  std::int64_t layers = 0;
  for (const PlannedLayer& layer : step.layers) layers += layer.kind.layers;
  fmt::print("Sparse attention in one training step of {}, {}, over {} ranks, {}\n",
             request.model.name, documents_text(request), request.ranks,
             tools::name(request.sharding));
  fmt::print("{} by its rates of {}; network of {:g} GB/s a rank each way\n", request.device.name,
             request.device.date(), request.bandwidth * 1e-9);
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

void print_table(const std::vector<Planned>& plans) {
  const PlanRequest& first = plans.front().request;
  fmt::print("{} on {}, {:g} GB/s, {}\n", first.model.name, first.device.name,
             first.bandwidth * 1e-9, tools::name(first.sharding));
  Table table({"tokens", "ranks", "rows", "FLOP", "kernels", "network", "at best", "<bound by",
               "gathered", "reduced", "one layer", "regathered", "kept", "contiguous", "zigzag"});
  bool beyond_measured = false;
  for (const auto& [request, step] : plans) {
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
  if (beyond_measured) fmt::print("{}", beyond_measured_text(first.device));
}

Json json_of(const Planned& planned) {
  const auto& [request, step] = planned;
  Json layers = Json::array();
  for (const PlannedLayer& layer : step.layers) layers.push_back(json_of(layer, request.device));
  return {{"model", request.model.name},
          {"tokens", request.tokens},
          {"documents", request.cu_seqlens.size() - 1},
          {"ranks", request.ranks},
          {"sharding", tools::name(request.sharding)},
          {"gpu", request.device.name},
          {"rates_measured", request.device.date()},
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
           {{"gpu", request.device.memory_bytes},
            {"one_layer", step.one_layer_bytes},
            {"keys_regathered", step.regathered_bytes},
            {"keys_kept", step.kept_bytes}}},
          {"indexer_imbalance",
           {{"contiguous", step.contiguous_imbalance}, {"zigzag", step.zigzag_imbalance}}}};
}

}  // namespace winnow::plan
