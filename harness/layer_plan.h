// SPDX-License-Identifier: Apache-2.0
// LayerPlan: what one rank holds, sends and computes for one layer of a context-parallel step.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "harness/measured_rates.h"
#include "harness/memory.h"
#include "harness/models.h"
#include "harness/rank_work.h"

namespace winnow::harness {

/// How long a tensor is there.
enum class Kept : std::int32_t {
  within_layer,      // free again when the layer is done
  until_backward,    // between forward and backward of the layer
  unless_regathered  // likewise, or gathered a second time in backward
};

struct PlannedTensor {
  std::string_view name;
  std::string_view part;  // of the memory: "keys", "queries", ...
  Kept kept;
  DType dtype;
  Shape shape;

  double bytes() const;
};

struct PlannedCall {
  std::string_view name;  // of the function
  bool backward = false;
  double flops = 0;         // 0: bound by memory
  double bytes = 0;         // read or written once
  double listed_bytes = 0;  // read, or added to, at the keys of lists: from memory or the L2 cache
  double keys = 0;          // that a query reaches, in the mean
  double key_bytes = 0;     // of each of them, where lists are followed

  double memory_bytes(const Gpu& gpu) const;
  /// By the measured rate; without FLOPs by the rate of memory.
  double seconds(const Gpu& gpu, std::string_view geometry) const;
};

/// What a rank takes from others by one gather_keys, or gives to them by one scatter_key_grads.
struct PlannedMessage {
  std::string_view keys;
  bool backward = false;
  double bytes = 0;
};

struct LayerPlan {
  std::vector<PlannedTensor> tensors;
  std::vector<PlannedCall> calls;  // workspace comes on top of the tensors: see Execution
  std::vector<PlannedMessage> messages;
};
LayerPlan plan_layer(const LayerKind& kind, const WholeKeys& whole, const RankWork& work);

}  // namespace winnow::harness
