// SPDX-License-Identifier: Apache-2.0
// The general backward kernel's arguments, its numbers of a head, and rows on their way into shared
// memory.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/common/mma.cuh"
#include "cuda/common/row_slots.cuh"

namespace winnow::cuda::general_backward {

inline constexpr int kMaxTileKeys = 64;
inline constexpr int kKeyWarps = kMaxTileKeys / 16;  // that share the heads of a tile
inline constexpr int kMaxStages = 2;
inline constexpr int kLanesPerRow = 8;     // that copy a row together
inline constexpr int kColumnsAtOnce = 32;  // of d_kv; rows in shared memory are padded to it
inline constexpr unsigned kAllLanes = 0xffffffffu;

template <int kHeads>
inline constexpr int kThreads = kHeads == 16 ? 128 : 256;

/// Where a launch leaves what keys get.
enum class KeyGradient : std::int32_t {
  none,
  added,      // to sums of keys, by atomics
  stored,     // as terms of slots
  stored_too  // added to the terms of earlier heads
};

struct Parameters {
  const void* q;       // [tokens, heads, qk_dim]
  const void* kv;      // [keys, qk_dim]
  const void* out;     // [tokens, heads, v_dim]
  const void* d_out;   // [tokens, heads, v_dim]
  const float* sink;   // [heads], or null
  const float* lse;    // [tokens, heads]
  const float* d_lse;  // [tokens, heads], or null
  void* d_q;           // [tokens, heads, qk_dim], or null: not in this launch
  float* d_kv;         // [keys, qk_dim], or terms [rows, slots, qk_dim]
  float* d_sink;       // [heads], or null: not in this launch
  std::int64_t q_token_stride, q_head_stride;
  std::int64_t kv_stride;
  std::int64_t out_token_stride, out_head_stride;
  std::int64_t d_out_token_stride, d_out_head_stride;
  std::int64_t lse_stride, d_lse_stride;
  std::int64_t d_q_token_stride, d_q_head_stride;
  std::int64_t d_kv_stride;
  SlotLists slots;          // of the rows from first_row on
  std::int64_t first_row;   // of the launch
  std::int64_t rows;        // of the launch
  std::int64_t first_head;  // of the launch
  std::int64_t groups;      // of heads, in the launch
  std::int32_t splits;      // of a row's slots between blocks; 1 where there is a d_q
  std::int64_t heads;
  std::int32_t qk_dim, v_dim;
  std::int32_t tile_keys, stages;
  KeyGradient key_gradient;
  bool q_aligned, kv_aligned;       // rows at 16-byte boundaries
  bool out_aligned, d_out_aligned;  // likewise
  bool d_q_aligned, d_kv_aligned;   // likewise
  float scale;
};

/// Of one head: exp(s - lse) is the share of a key among keys; P = share * that, and
/// dS = (share * dP + offset) * that.
struct alignas(16) HeadNumbers {
  float lse;
  float share;   // exp(lse - L): what the sink leaves to the keys
  float offset;  // d_lse - share * delta
  float d_sink;  // what the sink gets if the query has keys
};

__host__ __device__ constexpr int padded_dim(int dim) {
  return (dim + kColumnsAtOnce - 1) / kColumnsAtOnce * kColumnsAtOnce;
}
/// Eight rows begin in different banks.
template <class T>
__host__ __device__ constexpr int row_elements(int dim) {
  return padded_dim(dim) + static_cast<int>(16 / sizeof(T));
}

// ---- Numbers of a head.

/// This lane's part of a product of two rows, in the same order whether they are aligned or not.
template <class T>
__device__ float dot_part(const T* a, const T* b, int dim, bool aligned, int lane) {
  constexpr int kVector = 16 / sizeof(T);
  float sum = 0;
  for (int d = lane * kVector; d < dim; d += 32 * kVector) {
    alignas(16) T x[kVector];
    alignas(16) T y[kVector];
    if (aligned) {
      *reinterpret_cast<uint4*>(x) = *reinterpret_cast<const uint4*>(a + d);
      *reinterpret_cast<uint4*>(y) = *reinterpret_cast<const uint4*>(b + d);
    } else {
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        x[i] = a[d + i];
        y[i] = b[d + i];
      }
    }
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      sum = fmaf(static_cast<float>(x[i]), static_cast<float>(y[i]), sum);
    }
  }
  return sum;
}

/// The same for all lanes of the warp that asks.
template <class T>
__device__ HeadNumbers numbers_of_head(const Parameters& parameters, std::int64_t t,
                                       std::int64_t h) {
  const T* const out = static_cast<const T*>(parameters.out) + t * parameters.out_token_stride +
                       h * parameters.out_head_stride;
  const T* const d_out = static_cast<const T*>(parameters.d_out) +
                         t * parameters.d_out_token_stride + h * parameters.d_out_head_stride;
  float delta =
      dot_part(out, d_out, parameters.v_dim, parameters.out_aligned && parameters.d_out_aligned,
               static_cast<int>(threadIdx.x) % 32);
#pragma unroll
  for (int step = 16; step > 0; step /= 2) delta += __shfl_xor_sync(kAllLanes, delta, step);
  HeadNumbers numbers{
      .lse = parameters.lse[t * parameters.lse_stride + h], .share = 1, .offset = 0, .d_sink = 0};
  if (parameters.sink != nullptr) {
    const float sink = parameters.sink[h];
    const float lesser = expf(-fabsf(numbers.lse - sink));  // at most 1, as its inverse may not be
    const float larger_share = 1 / (1 + lesser);
    const float lesser_share = lesser / (1 + lesser);
    const bool keys_are_larger = numbers.lse >= sink;
    numbers.share = keys_are_larger ? larger_share : lesser_share;
    // An infinite sink has no gradient: there is none, or out is 0.
    if (!isinf(sink)) numbers.d_sink = -delta * (keys_are_larger ? lesser_share : larger_share);
  }
  const float d_lse =
      parameters.d_lse == nullptr ? 0 : parameters.d_lse[t * parameters.d_lse_stride + h];
  numbers.offset = d_lse - numbers.share * delta;
  return numbers;
}

// ---- Rows on their way into shared memory.

/// Eight lanes copy one row; null: zeros.
template <class T>
__device__ void copy_row(T* to, const T* from, int dim, bool aligned, int lane) {
  constexpr int kVector = 16 / sizeof(T);
  if (from == nullptr) {
#pragma unroll 1
    for (int d = lane * kVector; d < dim; d += kLanesPerRow * kVector) {
      *reinterpret_cast<uint4*>(to + d) = uint4{};
    }
  } else if (aligned) {
    for (int d = lane * kVector; d < dim; d += kLanesPerRow * kVector) {
      copy_16_bytes_async(to + d, from + d);
    }
  } else {
#pragma unroll 1
    for (int d = lane; d < dim; d += kLanesPerRow) to[d] = from[d];
  }
}

/// The rows of one query's keys, tile by tile.
template <class T, int kThreadCount>
class Gather {
 public:
  __device__ Gather(const Parameters& parameters, const RowSlots& slots, int first_tile)
      : parameters_(parameters), slots_(slots) {
    load_keys(first_tile);
  }

  /// Copies the rows of a tile, whose keys were loaded a tile before, and loads the next one's.
  __device__ void start(int tile, T* rows, std::int32_t* keys) {
    const T* const kv = static_cast<const T*>(parameters_.kv);
    has_key_ = false;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int row = group_ + i * kGroups;
      if (row >= parameters_.tile_keys) break;
      const T* const from = next_[i] < 0 ? nullptr : kv + next_[i] * parameters_.kv_stride;
      copy_row(rows + row * row_elements<T>(parameters_.qk_dim), from, parameters_.qk_dim,
               parameters_.kv_aligned, lane_);
      if (lane_ == 0) keys[row] = next_[i];
      has_key_ = has_key_ || next_[i] >= 0;
    }
    commit_copies();
    load_keys(tile + 1);
  }

  /// Whether this thread's part of the tile that was started last has a key.
  __device__ bool has_key() const { return has_key_; }

 private:
  static constexpr int kGroups = kThreadCount / kLanesPerRow;
  static constexpr int kRows = kMaxTileKeys / kGroups;

  __device__ void load_keys(int tile) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int row = group_ + i * kGroups;
      next_[i] = row < parameters_.tile_keys
                     ? slots_.key(std::int64_t{tile} * parameters_.tile_keys + row)
                     : -1;
    }
  }

  const Parameters& parameters_;
  const RowSlots& slots_;
  int group_ = static_cast<int>(threadIdx.x) / kLanesPerRow;
  int lane_ = static_cast<int>(threadIdx.x) % kLanesPerRow;
  bool has_key_ = false;
  std::int32_t next_[kRows];
};

}  // namespace winnow::cuda::general_backward
