// SPDX-License-Identifier: Apache-2.0
// The gradients that one query row of the indexer gives. The map is at the head of gradient.cu.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "cuda/common/block_reduce.cuh"
#include "cuda/common/head_products.cuh"
#include "cuda/common/key_sums.cuh"
#include "cuda/index_topk/row_scale.cuh"

namespace winnow::cuda::row_gradient {

/// Steps of a pass over columns, which has 128 of them.
template <class T>
inline constexpr int kColumnSteps = std::is_same_v<T, float> ? 4 : 2;

/// One pass over some heads and columns.
struct GradientParameters {
  HeadOperands operands;
  const float* weights;   // [tokens, heads], like all others from the pass's first head on
  const float* d_scores;  // [tokens, slots]
  void* d_q;              // [tokens, heads, dim], or null: not made by this pass
  float* d_weights;       // [tokens, heads], or null
  float* d_k;             // [keys, dim], or terms [tokens, slots, dim]
  std::int64_t weights_stride, d_scores_stride;
  std::int64_t d_q_token_stride, d_q_head_stride;
  std::int64_t d_weights_stride;
  std::int64_t d_k_stride;
  std::int32_t first_column;  // of the pass
  std::int32_t column_steps;
  KeyGradient key_gradient;
  bool zero_is_no_slot;
  bool d_q_aligned;  // pairs of elements are aligned to the pair
  bool d_k_aligned;  // and fours to the four
};

template <class T, int kHeads>
struct SharedStorage {
  using Tile = HeadTile<T, kHeads>;
  static constexpr int kStride = kHeads + Tile::kVector;

  typename Tile::Stage stages[kHeadStages];
  alignas(16) T d_scores[kTileKeys][kStride];  // where a > 0, else 0
  alignas(16) T weights[kTileKeys][kStride];   // likewise
  float weight[kHeads];                        // of the row
  float scaled_weight[kHeads];                 // divided by RowScale::weight
  float d_weights[Tile::kKeyWarps][kHeads];    // the part of each warp's keys
  float reduction[kHeadThreads / 32];
};

/// The scales of a row; 1 where the type has the range of fp32.
template <class T, int kHeads>
__device__ RowScale scale_of_row(const GradientParameters& parameters, const RowSlots& slots,
                                 const float* d_scores, SharedStorage<T, kHeads>& shared) {
  if constexpr (!std::is_same_v<T, __half>) {
    return {};
  } else {
    const int thread = static_cast<int>(threadIdx.x);
    const auto larger = [](float a, float b) { return fmaxf(a, b); };
    float d_score = 0;
    for (std::int64_t slot = thread; slot < slots.count; slot += kHeadThreads) {
      if (slots.key(slot) >= 0) d_score = fmaxf(d_score, finite_magnitude(d_scores[slot]));
    }
    const float weight = thread < kHeads ? finite_magnitude(shared.weight[thread]) : 0;
    return {1 / power_of_two_below(reduce_block<kHeadThreads>(d_score, shared.reduction, larger)),
            power_of_two_below(reduce_block<kHeadThreads>(weight, shared.reduction, larger))};
  }
}

/// Adds four neighbours, by one instruction where they are aligned.
__device__ inline void add_four(float* to, const float (&x)[4], bool aligned) {
#if __CUDA_ARCH__ >= 900
  if (aligned) {
    asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x[0]), "f"(x[1]),
                 "f"(x[2]), "f"(x[3])
                 : "memory");
    return;
  }
#endif
#pragma unroll
  for (int i = 0; i < 4; ++i) atomicAdd(to + i, x[i]);
}

template <class T, int kHeads>
class RowGradient {
 public:
  using Tile = HeadTile<T, kHeads>;
  using Stage = typename Tile::Stage;
  using Storage = SharedStorage<T, kHeads>;

  __device__ RowGradient(const GradientParameters& parameters, const RowSlots& slots,
                         std::int64_t t, Storage& shared)
      : parameters_(parameters),
        slots_(slots),
        t_(t),
        d_scores_(parameters.d_scores + t * parameters.d_scores_stride),
        shared_(shared) {}

  __device__ void run() {
    const int thread = static_cast<int>(threadIdx.x);
    const HeadOperands& operands = parameters_.operands;
    if (thread < kHeads) {
      const bool has_head = thread < operands.heads;
      shared_.weight[thread] =
          has_head ? parameters_.weights[t_ * parameters_.weights_stride + thread] : 0;
    }
    scale_ = scale_of_row<T, kHeads>(parameters_, slots_, d_scores_, shared_);
    if (thread < kHeads) {  // there for all after the first step's barrier
      shared_.scaled_weight[thread] = shared_.weight[thread] / scale_.weight;
    }

#pragma unroll
    for (int step = 0; step < kColumnSteps<T>; ++step) clear_accumulators(d_q_[step]);
    HeadProducts<T, kHeads> tiles(operands, slots_, t_, shared_.stages, parameters_.first_column,
                                  parameters_.column_steps);
    for (int tile = 0; tile < tiles.tiles(); ++tile) {
      // These loads are in flight during the tile's first products.
#pragma unroll
      for (int i = 0; i < Tile::kKeyBlocks; ++i) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const std::int64_t slot = std::int64_t{tile} * kTileKeys + Tile::key(i, r * 2);
          d_score_[i][r] = slot < slots_.count ? d_scores_[slot] : 0;
        }
      }
      typename Tile::Accumulator products;
      const Stage& stage = tiles.multiply(products);
      // After this barrier both matrices are there for all.
      const bool is_finite = __syncthreads_or(take_products(products, stage) ? 0 : 1) == 0;
#pragma unroll
      for (int step = 0; step < kColumnSteps<T>; ++step) {
        if (step < parameters_.column_steps) {
          const Stage& columns = tiles.next();
          if (parameters_.d_q != nullptr) add_to_query(d_q_[step], columns, is_finite);
          if (parameters_.key_gradient != KeyGradient::none) {
            add_to_keys(columns, tile, step * Tile::kChannels, is_finite);
          }
        }
      }
    }
    store_d_weights();
    store_d_q();
  }

 private:
  static constexpr unsigned kAllLanes = 0xffffffffu;
  // How warps share d_q's heads x columns and d_k's keys x columns; a warp's keys are those of its
  // products.
  static constexpr int kQueryWarps = kHeads == 16 ? 1 : 2;  // along heads
  static constexpr int kQueryColumns = Tile::kChannels * kQueryWarps / (kHeadThreads / 32);
  static constexpr int kQueryBlocks = kHeads / kQueryWarps / 16;
  static constexpr int kKeyColumns = Tile::kChannels / Tile::kHeadWarps;
  static constexpr int kColumnsAtOnce = 32 / Tile::kKeyBlocks;  // d_k's registers suffice for these

  __device__ static int first_query_head() {
    return Tile::warp() % kQueryWarps * kQueryBlocks * 16;
  }
  __device__ static int first_query_column() { return Tile::warp() / kQueryWarps * kQueryColumns; }

  /// Fills both matrices and adds to d_weights; returns whether all products are finite.
  __device__ bool take_products(const typename Tile::Accumulator& products, const Stage& stage) {
    bool is_finite = true;
#pragma unroll
    for (int n = 0; n < Tile::kHeadBlocks; ++n) {
      bool has_head[2];
      float weight[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        has_head[e] = Tile::head(n, e) < parameters_.operands.heads;
        weight[e] = shared_.scaled_weight[Tile::head(n, e)];
      }
#pragma unroll
      for (int i = 0; i < Tile::kKeyBlocks; ++i) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int key = Tile::key(i, r * 2);
          const float d_score = d_score_[i][r];
          const float scaled_d_score = d_score * scale_.d_score;
          const bool has_key = stage.key[key] >= 0;
          const bool counts = has_key && !(parameters_.zero_is_no_slot && d_score == 0);
          bool is_positive[2];
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const float a = products[i][n][r * 2 + e];
            is_positive[e] = counts && has_head[e] && a > 0;
            is_finite = is_finite && (!has_key || !has_head[e] || fabsf(a) < INFINITY);
            if (counts) d_weights_[n][e] = fmaf(d_score, a < 0 ? 0 : a, d_weights_[n][e]);
          }
          const int h = Tile::head(n, 0);
          put_pair(&shared_.d_scores[key][h], is_positive[0] ? scaled_d_score : 0,
                   is_positive[1] ? scaled_d_score : 0);
          put_pair(&shared_.weights[key][h], is_positive[0] ? weight[0] : 0,
                   is_positive[1] ? weight[1] : 0);
        }
      }
    }
    return is_finite;
  }

  /// Whether a > 0, read back from the matrices; where both are 0 the answer does not matter.
  __device__ bool is_positive(int key, int h) const {
    return static_cast<float>(shared_.d_scores[key][h]) != 0 ||
           static_cast<float>(shared_.weights[key][h]) != 0;
  }

  /// d_q [heads, columns] += d_scores [keys, heads]^T keys [keys, columns].
  template <class Sums>
  __device__ void add_to_query(Sums& d_q, const Stage& columns, bool is_finite) {
    const int first_head = first_query_head();
    const int first_column = first_query_column();
    if (is_finite) {
      multiply_tile<kTileKeys, false, false>(d_q, &shared_.d_scores[0][first_head],
                                             Storage::kStride, &columns.keys[0][first_column],
                                             Tile::kStride);
      return;
    }
    add_terms(
        d_q, kTileKeys,
        [&](int h, int key) { return static_cast<float>(shared_.d_scores[key][first_head + h]); },
        [&](int key, int d) { return static_cast<float>(columns.keys[key][first_column + d]); },
        [&](int h, int key) { return is_positive(key, first_head + h); });
  }

  /// Emits d_score times weights [keys, heads] q [heads, columns] to the keys.
  __device__ void add_to_keys(const Stage& columns, int tile, int tile_column, bool is_finite) {
    const int first_key = Tile::first_key();
#pragma unroll
    for (int part = 0; part < kKeyColumns / kColumnsAtOnce; ++part) {
      const int first_column = Tile::head_warp() * kKeyColumns + part * kColumnsAtOnce;
      float sums[Tile::kKeyBlocks][kColumnsAtOnce / 8][4];
      clear_accumulators(sums);
      if (is_finite) {
        multiply_tile<kHeads, true, false>(sums, &shared_.weights[first_key][0], Storage::kStride,
                                           &columns.heads[0][first_column], Tile::kStride);
      } else {
        add_terms(
            sums, kHeads,
            [&](int key, int h) { return static_cast<float>(shared_.weights[first_key + key][h]); },
            [&](int h, int d) { return static_cast<float>(columns.heads[h][first_column + d]); },
            [&](int key, int h) { return is_positive(first_key + key, h); });
      }
#pragma unroll
      for (int i = 0; i < Tile::kKeyBlocks; ++i) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int key = Tile::key(i, r * 2);
          const bool has_key = columns.key[key] >= 0;
          const std::int64_t row =
              parameters_.key_gradient == KeyGradient::added
                  ? columns.key[key]
                  : t_ * parameters_.operands.slots.slots + std::int64_t{tile} * kTileKeys + key;
          float* const to = parameters_.d_k + row * parameters_.d_k_stride;
          const float factor = d_score_[i][r] * scale_.weight;
#pragma unroll
          for (int n = 0; n < kColumnsAtOnce / 8; n += 2) {
            float four[4];
            const int in_blocks = four_neighbours(four, sums[i][n], sums[i][n + 1], r * 2);
            const int column =
                parameters_.first_column + tile_column + first_column + n * 8 + in_blocks;
            if (!has_key || column >= parameters_.operands.dim) continue;
#pragma unroll
            for (int e = 0; e < 4; ++e) four[e] = scaled(four[e], factor);
            emit_key(to + column, four);
          }
        }
      }
      __syncwarp();  // lanes without a key went ahead; the next products need the whole warp
    }
  }

  /// Of a row of two blocks of accumulators, whose lanes hold two neighbours each, every lane gets
  /// four neighbours; returns the column of the first.
  __device__ static int four_neighbours(float (&four)[4], const float (&first)[4],
                                        const float (&second)[4], int e) {
    const bool is_odd = Tile::lane() % 2 != 0;  // takes from the second block
    float got[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      got[i] = __shfl_xor_sync(kAllLanes, is_odd ? first[e + i] : second[e + i], 1);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      four[i] = is_odd ? got[i] : first[e + i];
      four[2 + i] = is_odd ? second[e + i] : got[i];
    }
    return (is_odd ? 8 : 0) + Tile::lane() % 4 / 2 * 4;
  }

  __device__ void emit_key(float* to, const float (&four)[4]) const {
    if (parameters_.key_gradient == KeyGradient::added) {
      add_four(to, four, parameters_.d_k_aligned);
      return;
    }
    const bool adds = parameters_.key_gradient == KeyGradient::stored_too;
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] = adds ? to[i] + four[i] : four[i];
  }

  /// Sums d_weights over the lanes and warps that share a head. After it no thread reads the last
  /// stage.
  __device__ void store_d_weights() {
#pragma unroll
    for (int n = 0; n < Tile::kHeadBlocks; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& sum = d_weights_[n][e];
#pragma unroll
        for (int step = 4; step < 32; step *= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
        if (Tile::lane() < 4) shared_.d_weights[Tile::key_warp()][Tile::head(n, e)] = sum;
      }
    }
    __syncthreads();
    const int h = static_cast<int>(threadIdx.x);
    if (parameters_.d_weights == nullptr || h >= parameters_.operands.heads) return;
    float sum = 0;
#pragma unroll
    for (int warp = 0; warp < Tile::kKeyWarps; ++warp) sum += shared_.d_weights[warp][h];
    parameters_.d_weights[t_ * parameters_.d_weights_stride + h] = sum;
  }

  __device__ void store_d_q() {
    if (parameters_.d_q == nullptr) return;
    T* const d_q = static_cast<T*>(parameters_.d_q) + t_ * parameters_.d_q_token_stride;
#pragma unroll
    for (int i = 0; i < kQueryBlocks; ++i) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int h = first_query_head() + i * 16 + row_in_block(Tile::lane(), r * 2);
        if (h >= parameters_.operands.heads) continue;
        T* const row = d_q + h * parameters_.d_q_head_stride;
        const float factor = shared_.weight[h] / scale_.d_score;
#pragma unroll
        for (int step = 0; step < kColumnSteps<T>; ++step) {
#pragma unroll
          for (int n = 0; n < kQueryColumns / 8; ++n) {
            const int column = parameters_.first_column + step * Tile::kChannels +
                               first_query_column() + n * 8 + column_in_block(Tile::lane(), 0);
            if (column >= parameters_.operands.dim) continue;
            const float first = scaled(d_q_[step][i][n][r * 2], factor);
            const float second = scaled(d_q_[step][i][n][r * 2 + 1], factor);
            if constexpr (std::is_same_v<T, float>) {
              row[column] = first;
              row[column + 1] = second;
            } else {
              store_pair(row + column, first, second, parameters_.d_q_aligned);
            }
          }
        }
      }
    }
  }

  const GradientParameters& parameters_;
  const RowSlots& slots_;
  std::int64_t t_;
  const float* d_scores_;
  Storage& shared_;
  RowScale scale_;
  float d_score_[Tile::kKeyBlocks][2];  // of this lane's keys in the tile
  float d_weights_[Tile::kHeadBlocks][2] = {};
  float d_q_[kColumnSteps<T>][kQueryBlocks][kQueryColumns / 8][4];
};

}  // namespace winnow::cuda::row_gradient
