// SPDX-License-Identifier: Apache-2.0
// A row of scores with its window, from which keys are selected, and the slots that they go to.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/index_topk/plan.cuh"

namespace winnow::cuda::index_topk {

/// The score of a key outside of the window: NaN, which is never selected.
__device__ inline float no_score() { return __uint_as_float(0x7fff'ffffu); }

__device__ inline bool can_be_selected(float score) { return score > -INFINITY; }

/// Keeps a pointer to global memory in registers. Without this the compiler computes it again at
/// every use, several instructions a slot, to save two registers.
template <class T>
__device__ T* held(T* pointer) {
  std::size_t address = __cvta_generic_to_global(pointer);
  asm("" : "+l"(address));
  return static_cast<T*>(__cvta_global_to_generic(address));
}

struct Row {
  const float* scores;  // from key `first` on
  int first;            // a multiple of 4
  int begin, end;       // the window
  const float* sample;  // of the tiles that lie in the window; aligned to two
  std::uint32_t sample_count;
  __device__ std::uint32_t count() const { return static_cast<std::uint32_t>(end - first); }
  /// Whether the key first + i is in the window.
  __device__ bool sees(std::uint32_t i) const {
    return static_cast<int>(i) >= begin - first && i < count();
  }
  /// Four neighbours from first + i on, with no_score outside of the window; i is a multiple of 4.
  __device__ float4 in_window(float4 four, std::uint32_t i) const {
    if (i > 0 && i + 4 <= count()) return four;
    if (!sees(i)) four.x = no_score();
    if (!sees(i + 1)) four.y = no_score();
    if (!sees(i + 2)) four.z = no_score();
    if (!sees(i + 3)) four.w = no_score();
    return four;
  }
  __device__ float4 four_scores(std::uint32_t i) const {
    return __ldcg(reinterpret_cast<const float4*>(scores + i));
  }
};

/// The row's scores and window.
__device__ inline Row row_of(const Plan& plan, int chunk, std::int64_t t) {
  const std::int64_t group = t / plan.rows_per_group;
  const std::int64_t tiles = plan.tiles(group);
  const int first = plan.first_key[group];
  const std::int64_t number = t % plan.rows_per_group;  // in its group
  const float* const scores = plan.scores_of_group(group, chunk);
  Row row{.scores = scores + number * tiles * kTileKeys,
          .first = first,
          .begin = plan.window_begin(t),
          .end = plan.window_end(t)};
  if (row.end <= row.begin) row.end = row.begin = first;
  const int first_tile = (row.begin - first + kTileKeys - 1) / kTileKeys;
  const int end_tile = max((row.end - first) / kTileKeys, first_tile);
  row.sample = scores + plan.sample_offset(tiles) + (number * tiles + first_tile) * kTileSample;
  row.sample_count = static_cast<std::uint32_t>(end_tile - first_tile) * kTileSample;
  // Nothing before the window is read but the rest of its first four neighbours.
  const int skipped = (row.begin - first) / 4 * 4;
  row.scores = held(row.scores + skipped);
  row.first += skipped;
  return row;
}

/// Sets values[first], ..., values[count - 1] to `value`, by `threads` threads, four at a time
/// where they are aligned.
template <class T>
__device__ void fill(T* values, int first, int count, T value, int thread, int threads) {
  constexpr int kFour = 4;
  struct alignas(kFour * sizeof(T)) Four {
    T of[kFour];
  };
  const auto address = reinterpret_cast<std::uintptr_t>(values + first) / sizeof(T);
  const int head = min(static_cast<int>((kFour - address % kFour) % kFour), count - first);
  for (int i = first + thread; i < first + head; i += threads) values[i] = value;
  first += head;
  const int end_of_fours = first + (count - first) / kFour * kFour;
  for (int i = first + thread * kFour; i < end_of_fours; i += threads * kFour) {
    *reinterpret_cast<Four*>(values + i) = {value, value, value, value};
  }
  for (int i = end_of_fours + thread; i < count; i += threads) values[i] = value;
}

struct Slots {
  std::int32_t* indices;
  float* scores;  // or null
  int topk;

  /// The slot is unsigned, so that its address takes one instruction.
  __device__ void set(std::uint32_t slot, int key, float score) const {
    indices[slot] = key;
    if (scores != nullptr) scores[slot] = score + 0.0f;  // -0 becomes 0
  }
  /// Sets four neighbouring slots to four neighbouring keys.
  __device__ void set_four(int slot, int key, const float (&of)[4]) const {
    const auto is_aligned = [&](const auto* values) {
      return reinterpret_cast<std::uintptr_t>(values + slot) % 16 == 0;
    };
    if (!is_aligned(indices) || (scores != nullptr && !is_aligned(scores))) {
#pragma unroll
      for (int j = 0; j < 4; ++j) set(slot + j, key + j, of[j]);
      return;
    }
    *reinterpret_cast<int4*>(indices + slot) = {key, key + 1, key + 2, key + 3};
    if (scores == nullptr) return;
    *reinterpret_cast<float4*>(scores + slot) = {of[0] + 0.0f, of[1] + 0.0f, of[2] + 0.0f,
                                                 of[3] + 0.0f};
  }
  /// Clears the slots from `slot` on, by all threads of a block or of a warp.
  __device__ void clear_from(int slot, int thread, int threads) const {
    fill(indices, slot, topk, -1, thread, threads);
    if (scores != nullptr) fill(scores, slot, topk, -INFINITY, thread, threads);
  }
};

}  // namespace winnow::cuda::index_topk
