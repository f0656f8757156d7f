// SPDX-License-Identifier: Apache-2.0
// Model: which kinds of sparse attention layers a model has, and how many of each.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "harness/cases.h"

namespace winnow::plan {

using harness::Case;

/// Where the index lists of a layer come from.
enum class Lists : std::int32_t {
  selected,  // by an indexer of its own; with a sliding window before them where the case has one
  reused,    // those of an earlier layer
  window,    // the sliding window alone
  all_pools  // the sliding window and every pool that the query may see
};

struct LayerKind {
  std::string name;
  std::int64_t layers;
  Lists lists;
  Case c;  // geometry only; with all_pools the slots of pools depend on the batch

  bool has_indexer() const { return lists == Lists::selected; }
};

struct Model {
  std::string name;
  std::vector<LayerKind> kinds;  // of the main layers, without those that predict further tokens

  /// Rows at whose multiples a shard of a document may begin, so that no pool is cut.
  int row_multiple() const;
};

/// A model of the cases with a model's own geometry. Throws std::invalid_argument for another.
Model find_model(std::string_view name);

}  // namespace winnow::plan
