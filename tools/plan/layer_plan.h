// SPDX-License-Identifier: Apache-2.0
// LayerPlan: what one rank holds, sends and computes for one layer of a context-parallel step.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "harness/memory.h"
#include "tools/plan/models.h"
#include "tools/plan/rank_work.h"
#include "tools/plan/rates.h"

namespace winnow::plan {

/// How long a tensor occupies memory.
enum class Kept : std::int32_t {
  within_layer,      // until the layer is done
  until_backward,    // between forward and backward of the layer
  unless_regathered  // likewise, unless it is gathered a second time in backward
};

struct PlannedTensor {
  std::string_view name;
  std::string_view part;  // of the memory: "keys", "queries", ...
  Kept kept;
  DType dtype;
  harness::Shape shape;

  double bytes() const;
};

enum class Bound : std::int32_t { compute, memory, network };
std::string_view name(Bound bound);

struct PlannedCall {
  std::string_view name;  // of the function
  bool backward = false;
  double flops = 0;         // 0: bound by memory
  double bytes = 0;         // read or written once
  double listed_bytes = 0;  // read, or added to, at the keys of lists: in memory or in the L2 cache
  double keys = 0;          // that a query reaches, on average
  double key_bytes = 0;     // of each of them, where lists are followed

  double memory_bytes(const DeviceRates& device) const;
  /// By the measured rate of the call; without FLOPs by the rate of memory.
  double seconds(const DeviceRates& device, std::string_view model) const;
  Bound bound(const DeviceRates& device) const;
};

/// What a rank receives in one gather_keys, or sends in one scatter_key_grads.
struct PlannedMessage {
  std::string_view keys;
  bool backward = false;
  double bytes = 0;

  std::string_view call() const { return backward ? "scatter_key_grads" : "gather_keys"; }
};

struct LayerPlan {
  std::vector<PlannedTensor> tensors;  // without the workspace of the calls
  std::vector<PlannedCall> calls;
  std::vector<PlannedMessage> messages;
};
LayerPlan plan_layer(const LayerKind& kind, const WholeKeys& whole, const RankWork& work);

}  // namespace winnow::plan
