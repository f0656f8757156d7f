// SPDX-License-Identifier: Apache-2.0
// RankWork: how much of a packed batch falls to each rank, counted from its shards and windows.
#pragma once

#include <cstdint>
#include <vector>

#include "tools/plan/models.h"
#include "winnow/parallel.h"

namespace winnow::plan {

/// A packed batch and how its rows are cut.
struct ShardedBatch {
  std::vector<std::int32_t> cu_seqlens;
  std::int64_t tokens = 0;
  Shards shards;
};

/// What all ranks have together in one kind of layer.
struct WholeKeys {
  std::int64_t rows = 0;
  std::int64_t pools = 0;       // of all documents
  std::int64_t most_pools = 0;  // of the longest one
  bool reordered = false;       // the order of ranks is not that of the batch
};
WholeKeys whole_keys(const LayerKind& kind, const ShardedBatch& batch);

/// The part of one rank in one kind of layer, counted over its rows.
struct RankWork {
  std::int64_t rows = 0;
  std::int64_t pools = 0;    // that end in its rows
  std::int64_t seen = 0;     // index keys of all windows
  std::int64_t chosen = 0;   // of them, listed for attention
  std::int64_t sliding = 0;  // rows of all sliding windows

  std::int64_t slots() const { return chosen + sliding; }
};
/// Of every rank.
std::vector<RankWork> rank_works(const LayerKind& kind, const ShardedBatch& batch);

/// Index keys seen by the busiest rank over those of the mean rank: how much longer than with equal
/// shares the indexer takes. 1 where there is nothing to do.
double imbalance(const std::vector<RankWork>& works);

}  // namespace winnow::plan
