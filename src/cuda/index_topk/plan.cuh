// SPDX-License-Identifier: Apache-2.0
// How index_topk cuts its work. Scores of `rows_per_group` neighbouring rows are computed together,
// for all keys that any of them sees, in tiles of 128 keys. Groups follow each other in a buffer of
// bounded size; what does not fit is left to the next chunk. The plan is made on the device, from
// the windows.
//
// Behind its scores a row has a sample of them, for the selection: of each 32 neighbouring keys,
// two that are 8 apart. Scores and sample of keys outside of the row's window are anything.
//
// A group that has tiles counts one more, its set-up tile, for the time that a thread block spends
// on starting a group: on Hopper that takes about as long as a tile, so that equal counts are equal
// work. The set-up tile's place in the buffer, after the group's scores, stays empty.
#pragma once

#include <cstdint>

#include <cuda_runtime_api.h>

namespace winnow::cuda::index_topk {

inline constexpr int kTileKeys = 128;
inline constexpr int kTileSample = 6;  // scores of a row and a tile that are in the sample
inline constexpr int kTileFloats = kTileKeys + kTileSample;
inline constexpr int kMaxRowsPerGroup = 8;

struct Plan {
  std::int64_t* first_tile;   // [groups + 1]: the number of tiles in earlier groups
  std::int32_t* first_key;    // [groups]: a multiple of 4
  std::int32_t* first_group;  // [chunks + 1]
  float* scores;              // of one chunk, with their samples
  const std::int32_t* begin;  // [tokens]
  const std::int32_t* end;    // [tokens]
  const std::uint8_t* done;   // [tokens], or null: whether the row has its slots already
  std::int32_t* odd_scales;   // one: whether scales of keys may not commute with max
  std::int64_t tokens;
  std::int64_t groups;
  std::int64_t chunk_tiles;  // a group belongs to chunk first_tile / chunk_tiles
  int chunks;
  int keys;
  int rows_per_group;

  /// The group's scores in the buffer: rows_per_group rows of tiles(group) tiles.
  __device__ float* scores_of_group(std::int64_t group, int chunk) const {
    return scores + (first_tile[group] - chunk * chunk_tiles) * kTileFloats * rows_per_group;
  }
  /// The sample of a group with so many tiles, from its first score on: rows as those of scores.
  __device__ std::int64_t sample_offset(std::int64_t tiles) const {
    return tiles * kTileKeys * rows_per_group;
  }
  /// Tiles of a group that has some, without the set-up tile.
  __device__ std::int64_t tiles(std::int64_t group) const {
    return first_tile[group + 1] - first_tile[group] - 1;
  }
  __device__ bool is_done(std::int64_t t) const { return done != nullptr && done[t] != 0; }
  __device__ int window_begin(std::int64_t t) const { return within_keys(begin[t]); }
  __device__ int window_end(std::int64_t t) const { return within_keys(end[t]); }
  __device__ int within_keys(int key) const { return min(max(key, 0), keys); }
};

/// Which keys of a tile are in the sample: of three in eight blocks of 16 keys, key `row` and key
/// `row` + 8. Blocks take turns from tile to tile, and the row is as good as random, so that the
/// sample is spread evenly and no pattern of the scores misleads.
struct Sampled {
  int place;  // of the first one, in the tile's sample; the second stands behind it
  int row;    // 0 to 7
  __device__ Sampled(int tile, int block)
      : place(3 * (tile + block) % 8 * 2),
        row(static_cast<int>((static_cast<unsigned>(tile) * 8 + block) * 0x9e37'79b1u >> 29)) {}
  __device__ bool any() const { return place < kTileSample; }
};

/// Whether a scale of a key may be multiplied into a sum of positive parts instead of the products:
/// not if it is zero, negative, infinite or NaN.
__device__ inline bool commutes_with_max(float scale) { return scale > 0 && scale <= 3.4e38f; }

/// max(x, 0) that keeps NaN.
__device__ inline float positive_part(float x) {
  float y;
  asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(y) : "f"(x));
  return y;
}

/// The tiles of a chunk that one of `blocks` thread blocks computes: a contiguous and equal part,
/// one group after another.
class Share {
 public:
  /// Called by all lanes of a warp; they get the same share.
  __device__ Share(const Plan& plan, int chunk, int block, int blocks, int lane) : plan_(plan) {
    const std::int64_t first_group = plan.first_group[chunk];
    const std::int64_t end_group = plan.first_group[chunk + 1];
    const std::int64_t first = plan.first_tile[first_group];
    const std::int64_t count = plan.first_tile[end_group] - first;
    tile_ = first + count * block / blocks;
    end_ = first + count * (block + 1) / blocks;
    if (empty()) return;
    // Find the last group that begins at or before the tile. A group without tiles begins where the
    // next one does, so the last of them has tiles.
    std::int64_t low = first_group;
    std::int64_t high = end_group;
    while (high - low > 1) {
      const std::int64_t step = (high - low + 31) / 32;
      const std::int64_t probe = low + lane * step;
      const bool at_or_before = probe < high && plan.first_tile[probe] <= tile_;
      const int last = 31 - __clz(__ballot_sync(0xffffffffu, at_or_before));
      low += last * step;
      high = low + step < high ? low + step : high;
    }
    group_ = low;
  }

  __device__ bool empty() const { return tile_ >= end_; }
  __device__ std::int64_t group() const { return group_; }
  /// This share's tiles [first, end) of the group, counted from the group's first keys. Of its last
  /// group a share may have only the set-up tile: then both are 0.
  __device__ int first_tile_of_group() const {
    return static_cast<int>(max(tile_ - plan_.first_tile[group_] - 1, std::int64_t{0}));
  }
  __device__ int end_tile_of_group() const {
    return static_cast<int>(end_of_group() - plan_.first_tile[group_] - 1);
  }
  __device__ void next_group() {
    tile_ = end_of_group();
    if (empty()) return;
    do {
      ++group_;
    } while (plan_.first_tile[group_ + 1] <= tile_);
  }

 private:
  __device__ std::int64_t end_of_group() const {
    const std::int64_t end = plan_.first_tile[group_ + 1];
    return end < end_ ? end : end_;
  }

  const Plan& plan_;
  std::int64_t tile_;
  std::int64_t end_;
  std::int64_t group_ = 0;
};

}  // namespace winnow::cuda::index_topk
