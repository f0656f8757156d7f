// SPDX-License-Identifier: Apache-2.0
// StepPlan: what the sparse attention of a model's training step costs the busiest of its ranks.
#pragma once

#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

#include "harness/layer_plan.h"

namespace winnow::harness {

struct PlanRequest {
  Model model;
  std::vector<std::int32_t> cu_seqlens;
  std::int64_t tokens = 0;  // rows behind the last document are padding
  int ranks = 1;
  Sharding sharding = Sharding::zigzag;
  Gpu gpu;
  double bandwidth = 0;  // bytes a second that a rank takes from others, and at once gives to them
};

enum class Bound : std::int32_t { compute, memory, network };
std::string_view name(Bound bound);

struct Cost {
  double flops = 0;
  double memory_bytes = 0;     // through the GPU's memory
  double network_bytes = 0;    // taken in forward, given in backward
  double kernel_seconds = 0;   // of all calls, by measured rates
  double product_seconds = 0;  // of the FLOPs at the speed of the GPU's own matrix product
  double memory_seconds = 0;   // of memory_bytes alone
  double network_seconds = 0;

  Cost& operator+=(const Cost& other);
  Cost times(double count) const;
  /// What takes longest: the network, or else what the kernels run against.
  Bound bound() const;
};
Cost operator+(Cost a, const Cost& b);

/// Bytes of one layer while it runs.
struct LayerMemory {
  std::vector<std::pair<std::string_view, double>> parts;  // workspace the last of them
  double kept = 0;                                         // of them until backward, in any case
  double regathered = 0;  // and these, unless they are gathered again

  double of(std::string_view part) const;  // 0: the layer has no such part
  double total() const;
};

struct PlannedLayer {
  LayerKind kind;
  LayerPlan plan;
  LayerMemory memory;
  Cost forward;
  Cost backward;

  Cost both() const { return forward + backward; }
  /// Communication hidden behind kernels as far as can be.
  double overlapped_seconds() const;
};

struct StepPlan {
  int rank = 0;  // the one with the most FLOPs
  std::int64_t rows = 0;
  std::vector<PlannedLayer> layers;  // one of each kind

  Cost forward, backward;  // of all layers
  double overlapped_seconds = 0;
  double one_layer_bytes = 0;   // where layers are computed again in backward
  double regathered_bytes = 0;  // all layers keep what backward needs but the gathered keys
  double kept_bytes = 0;        // and those too
  // Of the indexer's work, see imbalance(); 1 for a model without one.
  double contiguous_imbalance = 1;
  double zigzag_imbalance = 1;
  bool beyond_measured = false;  // a query reaches more keys than in any measurement

  Cost both() const { return forward + backward; }
};
StepPlan plan_step(const PlanRequest& request);

}  // namespace winnow::harness
