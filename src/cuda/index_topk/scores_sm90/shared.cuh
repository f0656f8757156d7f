// SPDX-License-Identifier: Apache-2.0
// What the producer and the consumers of index_topk's scores share on sm_90: sizes, shared memory,
// the order of a product's columns.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/hopper/barrier.cuh"
#include "cuda/hopper/pipeline.cuh"
#include "cuda/hopper/wgmma.cuh"
#include "cuda/index_topk/plan.cuh"

namespace winnow::cuda::index_topk::sm90 {

using namespace winnow::hopper;

inline constexpr int kDim = 128;
inline constexpr int kColumns = 256;  // of a product: heads of queries
inline constexpr int kRows = 64;      // of a product: keys
inline constexpr int kGroups = 2;     // stages of queries
template <class T>
inline constexpr int kStages = sizeof(T) == 1 ? 4 : 3;
inline constexpr int kWarpgroup = 128;
inline constexpr int kThreads = 3 * kWarpgroup;
inline constexpr int kProducerRegisters = 72;
inline constexpr int kConsumerRegisters = 216;

template <class T>
inline constexpr int kTiles = kDim* static_cast<int>(sizeof(T)) / kTileRowBytes;  // of one row

/// kCount rows of kDim elements, as tiles that the products read.
template <class T, int kCount>
struct Operand {
  std::byte tiles[kTiles<T>][kCount * kTileRowBytes];
};

/// The tiles of one group that a thread block computes.
struct Unit {
  std::int64_t group;
  std::int64_t scores;  // where the group's scores begin in the buffer
  std::int64_t tiles;   // of the whole group
  int first_key;
  int first, end;  // tiles, counted within the group; end is 0 after the last unit
};

template <class T>
struct SharedStorage {
  Operand<T, kTileKeys> keys[kStages<T>];
  Operand<T, kColumns> queries[kGroups];
  float weights[kGroups][kColumns];
  Unit units[kGroups];
  Barrier full[kStages<T>];
  Barrier free[kStages<T>];
  Barrier queries_full[kGroups];  // and their weights and unit
  Barrier queries_free[kGroups];
};
static_assert(sizeof(SharedStorage<__nv_bfloat16>) <= 227 * 1024);

/// Which query of a group, and which of its heads, a column of a product is. Of each 8 columns a
/// lane holds two neighbours: two queries, or two parts of one query's heads.
template <int kHeads>
struct Column {
  static constexpr int kParts = kHeads / 32;
  int query;
  int part;
  int number;  // in its part

  __device__ explicit Column(int column)
      : query(column % 8 / kParts), part(column % kParts), number(column / 8) {}
  /// With an odd number of heads in two parts, the last column of the first part repeats the first
  /// head of the second and does not count.
  __device__ bool has_head(int heads) const { return number < (heads + part) / kParts; }
  __device__ int head(int heads) const { return part * (heads / kParts) + number; }
};

}  // namespace winnow::cuda::index_topk::sm90
