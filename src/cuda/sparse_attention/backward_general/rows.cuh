// SPDX-License-Identifier: Apache-2.0
// The general backward kernel's constants of a head, and the gather of rows into shared memory.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/common/mma.cuh"
#include "cuda/common/own_index.cuh"
#include "cuda/common/row_slots.cuh"
#include "cuda/sparse_attention/copy_row.cuh"
#include "cuda/sparse_attention/parameters.cuh"

namespace winnow::cuda::sparse_attention::backward_general {

inline constexpr int kMaxStages = 2;
inline constexpr int kColumnsAtOnce = 32;  // of d_kv
inline constexpr unsigned kAllLanes = 0xffffffffu;

template <int kHeads>
inline constexpr int kThreads = kHeads == 16 ? 128 : 256;

/// The constants of one head: exp(s - lse) is a key's probability among the keys; P is share times
/// that, and dS is (share * dP + offset) times that.
struct alignas(16) HeadConstants {
  float lse;
  float share;   // exp(lse - L), the part that the sink leaves to the keys
  float offset;  // d_lse - share * delta
  float d_sink;  // the gradient of the sink if the query has keys
};

/// threadIdx.x. With 64 heads registers are short, and it is read anew; with fewer that only costs
/// instructions.
template <int kHeads>
__device__ unsigned thread_number() {
  if constexpr (kHeads == 64) return own_thread();
  return threadIdx.x;
}

__host__ __device__ constexpr int padded_dim(int dim) { return (dim + 15) / 16 * 16; }
/// The padding lets eight rows begin in different banks.
template <class T>
__host__ __device__ constexpr int row_elements(int qk_dim) {
  return padded_dim(qk_dim) + static_cast<int>(16 / sizeof(T));
}
/// Rows of d_out are read in pieces of kColumnsAtOnce.
__host__ __device__ constexpr int padded_v_dim(int v_dim) {
  return (v_dim + kColumnsAtOnce - 1) / kColumnsAtOnce * kColumnsAtOnce;
}
template <class T>
__host__ __device__ constexpr int v_row_elements(int v_dim) {
  return padded_v_dim(v_dim) + static_cast<int>(16 / sizeof(T));
}

// ---- The constants of a head.

/// This lane's part of the dot product of two rows, in the same order whether they are aligned or
/// not.
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

/// Computes the constants of a head by a warp; all lanes get them.
template <class T>
__device__ HeadConstants constants_of_head(const BackwardParameters& parameters, std::int64_t t,
                                           std::int64_t h) {
  const T* const out = static_cast<const T*>(parameters.out) + t * parameters.out_token_stride +
                       h * parameters.out_head_stride;
  const T* const d_out = static_cast<const T*>(parameters.d_out) +
                         t * parameters.d_out_token_stride + h * parameters.d_out_head_stride;
  float delta =
      dot_part(out, d_out, parameters.v_dim, parameters.out_aligned && parameters.d_out_aligned,
               static_cast<int>(threadIdx.x % 32));
#pragma unroll
  for (int step = 16; step > 0; step /= 2) delta += __shfl_xor_sync(kAllLanes, delta, step);
  HeadConstants constants{
      .lse = parameters.lse[t * parameters.lse_stride + h], .share = 1, .offset = 0, .d_sink = 0};
  if (parameters.sink != nullptr) {
    const float sink = parameters.sink[h];
    const float lesser = expf(-fabsf(constants.lse - sink));  // at most 1; its inverse may overflow
    const float larger_share = 1 / (1 + lesser);
    const float lesser_share = lesser / (1 + lesser);
    const bool keys_are_larger = constants.lse >= sink;
    constants.share = keys_are_larger ? larger_share : lesser_share;
    // An infinite sink has no gradient: -inf is no sink, and with +inf out is 0.
    if (!isinf(sink)) constants.d_sink = -delta * (keys_are_larger ? lesser_share : larger_share);
  }
  const float d_lse =
      parameters.d_lse == nullptr ? 0 : parameters.d_lse[t * parameters.d_lse_stride + h];
  constants.offset = d_lse - constants.share * delta;
  return constants;
}

// ---- The slots of a row.

/// Whether a row has keys; all lanes of the calling warp get the answer.
__device__ inline bool has_keys(const RowSlots& slots, int lane) {
  for (std::int64_t slot = lane; slot - lane < slots.count; slot += 32) {
    if (__any_sync(kAllLanes, slots.key(slot) >= 0)) return true;
  }
  return false;
}

/// Gathers the rows of one query's keys, tile by tile.
template <class T, int kHeads, int kThreadCount, int kMaxKeys>
class Gather {
 public:
  __device__ Gather(const BackwardParameters& parameters, const RowSlots& slots, int first_tile)
      : parameters_(parameters), slots_(slots) {
    load(first_tile);
  }

  /// Loads the keys of a tile ahead of its start. Only issues the loads; using the values here
  /// would stall.
  __device__ void load(int tile) {
    const int group = static_cast<int>(thread_number<kHeads>() / kLanesPerRow);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int row = group + i * kGroups;
      const auto slot = static_cast<std::uint32_t>(tile) * parameters_.tile_keys + row;
      next_[i] = -1;
      if (row < parameters_.tile_keys && slot < static_cast<std::uint32_t>(slots_.count)) {
        next_[i] = slots_.indices[slot];
      }
    }
  }

  /// Copies the rows of the tile whose keys were loaded last.
  __device__ void start(T* rows, std::int32_t* keys) {
    const T* const kv = static_cast<const T*>(parameters_.kv);
    const unsigned thread = thread_number<kHeads>();
    const int group = static_cast<int>(thread / kLanesPerRow);
    const int lane = static_cast<int>(thread % kLanesPerRow);
    has_key_ = false;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int row = group + i * kGroups;
      if (row >= parameters_.tile_keys) break;
      const std::int32_t key = next_[i] < parameters_.slots.keys ? next_[i] : -1;
      const T* const from = key < 0 ? nullptr : kv + key * parameters_.kv_stride;
      copy_row(rows + row * row_elements<T>(parameters_.qk_dim), from, parameters_.qk_dim,
               parameters_.kv_aligned, lane);
      if (lane == 0) keys[row] = key;
      has_key_ = has_key_ || key >= 0;
    }
    commit_copies();
  }

  /// Whether this thread's part of the last started tile has a key.
  __device__ bool has_key() const { return has_key_; }

 private:
  static constexpr int kGroups = kThreadCount / kLanesPerRow;
  static constexpr int kRows = kMaxKeys / kGroups;

  const BackwardParameters& parameters_;
  const RowSlots& slots_;
  bool has_key_ = false;
  std::int32_t next_[kRows];
};

}  // namespace winnow::cuda::sparse_attention::backward_general
