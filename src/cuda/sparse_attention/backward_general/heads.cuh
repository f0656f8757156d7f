// SPDX-License-Identifier: Apache-2.0
// What the general backward kernels share: their items, P and dS, and what they do with the rows of
// their heads in shared memory: loads, constants, the gradients of keys, and the stores of d_q.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/common/mma.cuh"
#include "cuda/common/softmax.cuh"
#include "cuda/common/tile_product.cuh"
#include "cuda/sparse_attention/backward_general/rows.cuh"
#include "cuda/sparse_attention/score_product.cuh"

namespace winnow::cuda::sparse_attention::backward_general {

/// What a thread block computes: some heads of a query row and a part of its slots. One item a
/// block: a loop over items would cost registers.
struct Item {
  int row;  // counted within the launch
  int first_head;
  int split;
};
template <int kHeads>
__device__ Item item_of_block(const BackwardParameters& parameters) {
  const auto splits = static_cast<unsigned>(parameters.splits);
  const auto groups = static_cast<unsigned>(parameters.groups);
  const unsigned group = blockIdx.x / splits % groups;
  return {.row = static_cast<int>(blockIdx.x / splits / groups),
          .first_head = static_cast<int>(parameters.first_head + group * kHeads),
          .split = static_cast<int>(blockIdx.x % splits)};
}

template <class T>
__device__ float probability(float log_p) {
  const float x = at_most_0(log_p);
  if constexpr (std::is_same_v<T, float>) {
    return expf(x);
  } else {
    return fast_exp2(x * kLog2E);
  }
}

/// P and dS of one head and one key.
struct KeyTerms {
  float p;
  float d_s;  // times the scale
};

/// P and dS of a key from its probability among the keys, `of_keys`; 0 where that is 0, as it is of
/// a slot without a key and of a head past the last, whatever the constants are.
__device__ inline KeyTerms key_terms(const BackwardParameters& parameters,
                                     const HeadConstants& constants, float of_keys, float d_p) {
  const float gradient = fmaf(constants.share, d_p, constants.offset);
  return {.p = of_keys == 0 ? 0 : of_keys * constants.share,
          .d_s = of_keys == 0 ? 0 : of_keys * gradient * parameters.scale};
}

/// Adds four neighbours by atomics; `aligned`: they begin at a multiple of 16 bytes.
__device__ inline void add_four(float* to, const float4& x, bool aligned) {
#if __CUDA_ARCH__ >= 900
  if (aligned) {
    asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x.x), "f"(x.y),
                 "f"(x.z), "f"(x.w)
                 : "memory");
    return;
  }
#endif
  atomicAdd(to, x.x);
  atomicAdd(to + 1, x.y);
  atomicAdd(to + 2, x.z);
  atomicAdd(to + 3, x.w);
}

/// The gradients of all keys, or the terms of an item's slots.
__device__ inline float* first_gradient(const BackwardParameters& parameters, const Item& item) {
  if (parameters.key_gradient == KeyGradient::added) return parameters.d_kv;
  return parameters.d_kv + std::int64_t{item.row} * parameters.slots.slots * parameters.d_kv_stride;
}
/// Which of them a key adds to.
__device__ inline std::int64_t gradient_row(const BackwardParameters& parameters, std::int32_t key,
                                            std::int32_t slot) {
  return parameters.key_gradient == KeyGradient::added ? key : slot;
}
/// Adds four neighbours to a gradient, or stores them, as parameters.key_gradient says.
__device__ inline void emit_to_key(const BackwardParameters& parameters, float* to, float4 x) {
  if (parameters.key_gradient == KeyGradient::added) {
    add_four(to, x, parameters.d_kv_aligned);
    return;
  }
  float4& term = *reinterpret_cast<float4*>(to);
  if (parameters.key_gradient == KeyGradient::stored_too) {
    const float4 before = term;
    x = {before.x + x.x, before.y + x.y, before.z + x.z, before.w + x.w};
  }
  term = x;
}

/// Puts zeros into the columns from `dim` to `end`.
template <class T, int kThreadCount>
__device__ void clear_columns(T* tile, int rows, int stride, int dim, int end) {
  const int columns = end - dim;
  for (int i = static_cast<int>(threadIdx.x); i < rows * columns; i += kThreadCount) {
    tile[i / columns * stride + dim + i % columns] = from_float<T>(0);
  }
}

/// A group of heads of one query row, whose rows of q and d_out stay in shared memory beside P and
/// dS [heads, keys] of one tile.
template <class T, int kHeads, int kKeyStride>
struct Heads {
  const BackwardParameters& parameters;
  const Item& item;
  T* q;      // [kHeads, stride]
  T* d_out;  // [kHeads, v_stride]
  int stride, v_stride;
  const T* p;    // [kHeads, kKeyStride]
  const T* d_s;  // likewise, times the scale

  static constexpr int kSize = sizeof(T);

  __device__ static int lane() { return static_cast<int>(threadIdx.x % 32); }
  __device__ static int warp() { return static_cast<int>(threadIdx.x / 32); }
  __device__ std::int64_t token() const { return parameters.first_row + item.row; }

  template <int kThreadCount>
  __device__ void load() const {
    const T* const from = static_cast<const T*>(parameters.q) + token() * parameters.q_token_stride;
    const T* const d_from =
        static_cast<const T*>(parameters.d_out) + token() * parameters.d_out_token_stride;
    const int lane_of_row = static_cast<int>(threadIdx.x % kLanesPerRow);
    for (int i = static_cast<int>(threadIdx.x / kLanesPerRow); i < kHeads;
         i += kThreadCount / kLanesPerRow) {
      const int h = item.first_head + i;
      const bool has_head = h < parameters.heads;
      copy_row(q + i * stride, has_head ? from + h * parameters.q_head_stride : nullptr,
               parameters.qk_dim, parameters.q_aligned, lane_of_row);
      copy_row(d_out + i * v_stride, has_head ? d_from + h * parameters.d_out_head_stride : nullptr,
               parameters.v_dim, parameters.d_out_aligned, lane_of_row);
    }
    commit_copies();
  }

  template <int kWarps>
  __device__ void compute_constants(HeadConstants (&constants)[kHeads]) const {
    for (int i = warp(); i < kHeads; i += kWarps) {
      HeadConstants computed{};
      if (item.first_head + i < parameters.heads) {
        computed = constants_of_head<T>(parameters, token(), item.first_head + i);
      }
      if (lane() == 0) constants[i] = computed;
    }
  }

  /// Emits dS^T Q + P^T dO of some keys and columns to the keys; `keys` are those of the tile.
  template <int kKeys, int kColumns>
  __device__ void add_to_keys(int first_key, int first_column, const std::int32_t* keys,
                              int first_slot) const {
    float sums[kKeys / 16][kColumns / 8][4];
    clear_accumulators(sums);
    multiply(sums, d_s + first_key, q + first_column, stride);
    if (first_column < parameters.v_dim) {
      multiply(sums, p + first_key, d_out + first_column, v_stride);
    }
    // Four lanes emit 16 columns of a row. A lane has a pair in each of two blocks of 8; even lanes
    // take the first block's pair from their neighbour, odd lanes the second's, so that each lane
    // has four columns.
    const int lane = static_cast<int>(thread_number<kHeads>() % 32);
    const bool is_odd = lane % 2 != 0;
    const int column = first_column + (is_odd ? 8 : 0) + lane % 4 / 2 * 4;
    float* const gradients = first_gradient(parameters, item);
#pragma unroll
    for (int i = 0; i < kKeys / 16; ++i) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int key_row = first_key + i * 16 + row_in_block(lane, r * 2);
        const std::int32_t key = keys[key_row];
        float* const to = gradients + gradient_row(parameters, key, first_slot + key_row) *
                                          parameters.d_kv_stride;
#pragma unroll
        for (int n = 0; n < kColumns / 8; n += 2) {
          const float* const first = &sums[i][n][r * 2];
          const float* const second = &sums[i][n + 1][r * 2];
          const float2 own = {is_odd ? second[0] : first[0], is_odd ? second[1] : first[1]};
          const float2 got = {__shfl_xor_sync(kAllLanes, is_odd ? first[0] : second[0], 1),
                              __shfl_xor_sync(kAllLanes, is_odd ? first[1] : second[1], 1)};
          if (key >= 0 && column + n * 8 < parameters.qk_dim) {
            emit_to_key(
                parameters, to + column + n * 8,
                is_odd ? float4{got.x, got.y, own.x, own.y} : float4{own.x, own.y, got.x, got.y});
          }
        }
      }
    }
  }

  /// Adds to the sinks' gradients if the row has keys; `constants` are those of the heads. The list
  /// is read once more: whether a key has come by would be kept through the loop over tiles.
  __device__ void add_to_sinks(const HeadConstants (&constants)[kHeads]) const {
    if (parameters.d_sink == nullptr || warp() * 32 >= kHeads) return;
    if (!has_keys(parameters.slots.row(item.row), lane())) return;
    const int i = static_cast<int>(threadIdx.x);
    if (i < kHeads && item.first_head + i < parameters.heads) {
      atomicAdd(parameters.d_sink + item.first_head + i, constants[i].d_sink);
    }
  }

  /// A warp has all heads and every kWarps-th block of 16 columns.
  template <int kWarps, int kPairs>
  __device__ void store_d_q(const float (&d_q)[kPairs][kHeads / 16][2][4]) const {
    if (parameters.d_q == nullptr) return;
    T* const to_row = static_cast<T*>(parameters.d_q) + token() * parameters.d_q_token_stride;
#pragma unroll
    for (int m = 0; m < kHeads / 16; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int h = item.first_head + m * 16 + row_in_block(lane(), r * 2);
        if (h >= parameters.heads) continue;
        T* const to = to_row + h * parameters.d_q_head_stride;
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
#pragma unroll
          for (int n = 0; n < 2; ++n) {
            const int column = (warp() + i * kWarps) * 16 + n * 8 + column_in_block(lane(), 0);
            if (column >= parameters.qk_dim) continue;
            const float first = d_q[i][m][n][r * 2];
            const float second = d_q[i][m][n][r * 2 + 1];
            if constexpr (std::is_same_v<T, float>) {
              to[column] = first;
              to[column + 1] = second;
            } else {
              store_pair(to + column, first, second, parameters.d_q_aligned);
            }
          }
        }
      }
    }
  }

 private:
  /// c += A [heads, keys]^T B [heads, columns].
  template <int kM, int kN>
  __device__ static void multiply(float (&c)[kM][kN][4], const T* a, const T* b, int b_stride) {
    if constexpr (kSize == 2) {
      const int lane = static_cast<int>(thread_number<kHeads>() % 32);
      const std::uint32_t a_row =
          fragment_address(shared_address(a), kKeyStride * kSize, columns_first(lane));
      std::uint32_t b_row = fragment_address(shared_address(b), b_stride * kSize, rows_first(lane));
#pragma unroll
      for (int h = 0; h < kHeads; h += 16) {
        std::uint32_t b_blocks[kN / 2][4];
#pragma unroll
        for (int n = 0; n < kN / 2; ++n) load_transposed_at(b_blocks[n], b_row + n * 16 * kSize);
        b_row += 16 * b_stride * kSize;
#pragma unroll
        for (int i = 0; i < kM; ++i) {
          std::uint32_t a_block[4];
          load_transposed_at(a_block, a_row + (h * kKeyStride + i * 16) * kSize);
#pragma unroll
          for (int n = 0; n < kN / 2; ++n) {
            multiply_add<T>(c[i][n * 2], a_block, b_blocks[n][0], b_blocks[n][1]);
            multiply_add<T>(c[i][n * 2 + 1], a_block, b_blocks[n][2], b_blocks[n][3]);
          }
        }
      }
    } else {
      multiply_tile<kHeads, false, false>(c, a, kKeyStride, b, b_stride);
    }
  }
};

}  // namespace winnow::cuda::sparse_attention::backward_general
