// SPDX-License-Identifier: Apache-2.0
// Sums the plans of all layers for the busiest rank.
#include "tools/plan/step_plan.h"

#include <algorithm>

#include "winnow/execution.h"

namespace winnow::plan {
namespace {

ShardedBatch shard(const PlanRequest& request, Sharding sharding) {
  return {.cu_seqlens = request.cu_seqlens,
          .tokens = request.tokens,
          .shards = shard_rows(request.cu_seqlens, request.tokens, request.ranks, sharding,
                               request.model.row_multiple())};
}

Cost cost_of(const LayerPlan& plan, const LayerKind& kind, bool backward,
             const PlanRequest& request) {
  const DeviceRates& device = request.device;
  Cost cost;
  for (const PlannedCall& call : plan.calls) {
    if (call.backward != backward) continue;
    cost.flops += call.flops;
    cost.memory_bytes += call.memory_bytes(device);
    cost.kernel_seconds += call.seconds(device, kind.c.name);
  }
  for (const PlannedMessage& message : plan.messages)
    if (message.backward == backward) cost.network_bytes += message.bytes;
  cost.product_seconds = cost.flops / device.matrix_product.value;
  cost.memory_seconds = cost.memory_bytes / device.memory_rate.value;
  cost.network_seconds = cost.network_bytes / request.bandwidth;
  return cost;
}

LayerMemory memory_of(const LayerPlan& plan) {
  LayerMemory memory;
  for (const PlannedTensor& each : plan.tensors) {
    auto part = std::find_if(memory.parts.begin(), memory.parts.end(),
                             [&](const auto& known) { return known.first == each.part; });
    if (part == memory.parts.end()) part = memory.parts.insert(part, {each.part, 0.0});
    part->second += each.bytes();
    if (each.kept == Kept::until_backward) memory.kept += each.bytes();
    if (each.kept == Kept::unless_regathered) memory.regathered += each.bytes();
  }
  memory.parts.emplace_back("workspace, at most", static_cast<double>(Execution{}.workspace_limit));
  return memory;
}

void sum_up(StepPlan& step) {
  double most_beside_kept = 0;
  double most_beside_all = 0;
  for (const PlannedLayer& layer : step.layers) {
    const auto count = static_cast<double>(layer.kind.layers);
    const LayerMemory& memory = layer.memory;
    step.forward.add(layer.forward, count);
    step.backward.add(layer.backward, count);
    step.overlapped_seconds += layer.overlapped_seconds() * count;
    step.one_layer_bytes = std::max(step.one_layer_bytes, memory.total());
    step.regathered_bytes += memory.kept * count;
    step.kept_bytes += (memory.kept + memory.regathered) * count;
    most_beside_kept = std::max(most_beside_kept, memory.total() - memory.kept);
    most_beside_all = std::max(most_beside_all, memory.total() - memory.kept - memory.regathered);
  }
  step.regathered_bytes += most_beside_kept;
  step.kept_bytes += most_beside_all;
}

}  // namespace

Cost& Cost::add(const Cost& other, double count) {
  flops += other.flops * count;
  memory_bytes += other.memory_bytes * count;
  network_bytes += other.network_bytes * count;
  kernel_seconds += other.kernel_seconds * count;
  product_seconds += other.product_seconds * count;
  memory_seconds += other.memory_seconds * count;
  network_seconds += other.network_seconds * count;
  return *this;
}

Bound Cost::bound() const {
  if (network_seconds > kernel_seconds) return Bound::network;
  return memory_seconds > product_seconds ? Bound::memory : Bound::compute;
}

double LayerMemory::of(std::string_view part) const {
  for (const auto& [known, bytes] : parts)
    if (known == part) return bytes;
  return 0;
}

double LayerMemory::total() const {
  double sum = 0;
  for (const auto& [part, bytes] : parts) sum += bytes;
  return sum;
}

double PlannedLayer::overlapped_seconds() const {
  return std::max(forward.kernel_seconds, forward.network_seconds) +
         std::max(backward.kernel_seconds, backward.network_seconds);
}

StepPlan plan_step(const PlanRequest& request,
                   const std::function<void(double share)>& begin_part) {
  const std::vector<LayerKind>& kinds = request.model.kinds;
  StepPlan step;
  std::vector<std::vector<RankWork>> works;  // of each kind, with the requested sharding
  std::vector<WholeKeys> whole;
  for (const Sharding sharding : {Sharding::contiguous, Sharding::zigzag}) {
    const ShardedBatch batch = shard(request, sharding);
    for (const LayerKind& kind : kinds) {
      begin_part(0.5 / static_cast<double>(kinds.size()));
      std::vector<RankWork> of_kind = rank_works(kind, batch);
      if (kind.has_indexer())
        (sharding == Sharding::zigzag ? step.zigzag_imbalance : step.contiguous_imbalance) =
            imbalance(of_kind);
      if (sharding != request.sharding) continue;
      works.push_back(std::move(of_kind));
      whole.push_back(whole_keys(kind, batch));
    }
  }

  double most_flops = -1;
  for (int rank = 0; rank < request.ranks; ++rank) {
    double flops = 0;
    for (std::size_t i = 0; i < kinds.size(); ++i)
      for (const PlannedCall& call : plan_layer(kinds[i], whole[i], works[i][rank]).calls)
        flops += static_cast<double>(kinds[i].layers) * call.flops;
    if (flops > most_flops) step.rank = rank;
    most_flops = std::max(most_flops, flops);
  }
  step.rows = works[0][step.rank].rows;
  for (std::size_t i = 0; i < kinds.size(); ++i) {
    LayerPlan plan = plan_layer(kinds[i], whole[i], works[i][step.rank]);
    for (const PlannedCall& call : plan.calls)
      step.beyond_measured |= call.keys > request.device.most_keys();
    step.layers.push_back({.kind = kinds[i],
                           .plan = plan,
                           .memory = memory_of(plan),
                           .forward = cost_of(plan, kinds[i], false, request),
                           .backward = cost_of(plan, kinds[i], true, request)});
  }
  sum_up(step);
  return step;
}

}  // namespace winnow::plan
