// SPDX-License-Identifier: Apache-2.0
// StepPlan: what the sparse attention of a model's training step costs the busiest of its ranks.
#pragma once

#include <cstdint>
#include <functional>
#include <string_view>
#include <utility>
#include <vector>

#include "tools/plan/layer_plan.h"
#include "winnow/parallel.h"

namespace winnow::plan {

struct PlanRequest {
  Model model;
  std::vector<std::int32_t> cu_seqlens;
  std::int64_t tokens = 0;  // rows behind the last document are padding
  int ranks = 1;
  Sharding sharding = Sharding::zigzag;
  DeviceRates device;
  double bandwidth = 0;  // bytes per second that a rank receives and at the same time sends
};

struct Cost {
  double flops = 0;
  double memory_bytes = 0;     // through the device's memory
  double network_bytes = 0;    // received in forward, sent in backward
  double kernel_seconds = 0;   // of all calls, by measured rates
  double product_seconds = 0;  // of the FLOPs at the rate of the device's own matrix product
  double memory_seconds = 0;   // of memory_bytes alone
  double network_seconds = 0;

  Cost& add(const Cost& other, double count = 1);
  /// The network where it takes longer than the kernels; else what limits the kernels.
  Bound bound() const;
};

/// Bytes of one layer while it runs.
struct LayerMemory {
  std::vector<std::pair<std::string_view, double>> parts;  // the workspace is the last one
  double kept = 0;        // of all parts, what stays until backward in any case
  double regathered = 0;  // and what stays unless it is gathered again

  double of(std::string_view part) const;  // 0: the layer has no such part
  double total() const;
};

struct PlannedLayer {
  LayerKind kind;
  LayerPlan plan;
  LayerMemory memory;
  Cost forward;
  Cost backward;

  /// With communication hidden behind kernels as far as possible.
  double overlapped_seconds() const;
};

struct StepPlan {
  int rank = 0;  // the one with the most FLOPs
  std::int64_t rows = 0;
  std::vector<PlannedLayer> layers;  // one of each kind

  Cost forward, backward;  // of all layers
  double overlapped_seconds = 0;
  double one_layer_bytes = 0;   // each layer is computed again in backward
  double regathered_bytes = 0;  // all layers keep what backward needs, except for gathered keys
  double kept_bytes = 0;        // all layers keep these too
  // imbalance() of the indexer's work; 1 for a model without an indexer.
  double contiguous_imbalance = 1;
  double zigzag_imbalance = 1;
  bool beyond_measured = false;  // a query reaches more keys than in any measurement

  Cost both() const { return Cost(forward).add(backward); }
};
/// Calls begin_part(share) before each part of the work, of which all shares are 1.
StepPlan plan_step(
    const PlanRequest& request,
    const std::function<void(double share)>& begin_part = [](double) {});

}  // namespace winnow::plan
