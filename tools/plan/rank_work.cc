// SPDX-License-Identifier: Apache-2.0
// Counts the work of every rank, row by row.
#include "tools/plan/rank_work.h"

#include <algorithm>
#include <functional>

#include "winnow/key_windows.h"

namespace winnow::plan {
namespace {

/// Index keys that each row of the batch may see: rows, or pools of `ratio` rows.
std::vector<std::int64_t> window_lengths(const ShardedBatch& batch, std::int32_t ratio) {
  const auto ints = [](std::vector<std::int32_t>& values) {
    return tensor(values.data(), DType::i32, {static_cast<std::int64_t>(values.size())});
  };
  std::vector<std::int32_t> begin(batch.tokens), end(batch.tokens);
  std::vector<std::int32_t> offsets = batch.cu_seqlens;
  key_windows(
      {.cu_seqlens = ints(offsets), .ratio = ratio, .begin = ints(begin), .end = ints(end)});
  std::vector<std::int64_t> lengths(batch.tokens);
  std::transform(end.begin(), end.end(), begin.begin(), lengths.begin(), std::minus<>());
  return lengths;
}

}  // namespace

WholeKeys whole_keys(const LayerKind& kind, const ShardedBatch& batch) {
  WholeKeys keys{.rows = batch.tokens};
  std::int32_t next = 0;
  for (const std::vector<std::int32_t>& rows : batch.shards.rows)
    for (const std::int32_t row : rows) keys.reordered |= row != next++;
  if (!kind.c.has_pools()) return keys;
  for (std::size_t i = 1; i < batch.cu_seqlens.size(); ++i) {
    const std::int64_t pools = (batch.cu_seqlens[i] - batch.cu_seqlens[i - 1]) / kind.c.ratio;
    keys.pools += pools;
    keys.most_pools = std::max(keys.most_pools, pools);
  }
  return keys;
}

std::vector<RankWork> rank_works(const LayerKind& kind, const ShardedBatch& batch) {
  const Case& c = kind.c;
  const std::vector<std::int64_t> rows_seen = window_lengths(batch, 1);
  const std::vector<std::int64_t> pools_seen =
      c.has_pools() ? window_lengths(batch, c.ratio) : std::vector<std::int64_t>{};
  std::vector<RankWork> works;
  for (const std::vector<std::int32_t>& rows : batch.shards.rows) {
    RankWork& work = works.emplace_back();
    work.rows = static_cast<std::int64_t>(rows.size());
    for (const std::int32_t row : rows) {
      work.sliding += std::min<std::int64_t>(rows_seen[row], c.window);
      if (kind.lists == Lists::window) continue;
      const std::int64_t seen = c.has_pools() ? pools_seen[row] : rows_seen[row];
      if (c.has_pools() && rows_seen[row] > 0 && rows_seen[row] % c.ratio == 0) ++work.pools;
      work.seen += seen;
      work.chosen += kind.lists == Lists::all_pools ? seen : std::min(seen, c.index_topk());
    }
  }
  return works;
}

double imbalance(const std::vector<RankWork>& works) {
  double most = 0;
  double sum = 0;
  for (const RankWork& work : works) {
    most = std::max(most, static_cast<double>(work.seen));
    sum += static_cast<double>(work.seen);
  }
  return sum > 0 ? most * static_cast<double>(works.size()) / sum : 1;
}

}  // namespace winnow::plan
