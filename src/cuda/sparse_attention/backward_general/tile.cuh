// SPDX-License-Identifier: Apache-2.0
// Sparse attention, backward, for every shape and type: the gradients that one query row gives.
//
// A block of 4 or 8 warps has one query row and 16, 32 or 64 of its heads, whose rows of q and
// d_out stay in shared memory. It walks over the row's slots in tiles of 64 keys (fewer where rows
// are wide):
// clang-format off
//   gather   8 lanes copy a row by cp.async; a slot without a key is zeros. With two stages the
//            next tile is in flight during the products of this one.
//   scores   A warp has 16 keys and 16 or 32 heads: S = Q K^T and dP = dO V^T, then P and dS go to
//            shared memory, rounded to the type of the inputs.
//   d_q      += dS K. A warp has all heads and every 4th or 8th block of 16 columns, in
//            accumulators.
//   d_kv     = dS^T Q + P^T dO. A warp has 32 keys and 32 columns at a time; they go to device
//            memory by atomics, or as terms that are summed deterministically
//            (common/key_sums.cuh).
// clang-format on
// There are two barriers a tile: rows are there and the previous tile is done; P and dS are there.
// Limits: the bandwidth of shared memory (two products a load of 512 bytes), the atomics in L2.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "cuda/common/mma.cuh"
#include "cuda/common/row_slots.cuh"
#include "cuda/common/softmax.cuh"
#include "cuda/common/tile_product.cuh"
#include "cuda/sparse_attention/backward_general/rows.cuh"

namespace winnow::cuda::sparse_attention::backward_general {

/// The tiles of q [kHeads, row_elements(qk_dim)], d_out [kHeads, row_elements(v_dim)] and kv
/// [stages, tile_keys, row_elements(qk_dim)] follow it.
template <class T, int kHeads>
struct alignas(16) SharedStorage {
  static constexpr int kStride = kMaxTileKeys + 16 / sizeof(T);

  alignas(16) T p[kHeads][kStride];
  alignas(16) T d_s[kHeads][kStride];  // times the scale
  HeadConstants constants[kHeads];
  std::int32_t key[kMaxStages][kMaxTileKeys];  // the key of each slot; -1: none
};

template <class T>
__device__ float probability(float log_p) {
  const float x = at_most_0(log_p);
  if constexpr (std::is_same_v<T, float>) {
    return expf(x);
  } else {
    return fast_exp2(x * kLog2E);
  }
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

/// kPairs: pairs of blocks of 8 columns of d_q that a warp has.
template <class T, int kHeads, int kPairs>
class RowGradient {
 public:
  using Storage = SharedStorage<T, kHeads>;

  __device__ RowGradient(const BackwardParameters& parameters, unsigned char* memory)
      : parameters_(parameters),
        shared_(*reinterpret_cast<Storage*>(memory)),
        stride_(row_elements<T>(parameters.qk_dim)),
        v_stride_(row_elements<T>(parameters.v_dim)),
        q_tile_(reinterpret_cast<T*>(memory + sizeof(Storage))),
        d_out_tile_(q_tile_ + kHeads * stride_),
        kv_tiles_(d_out_tile_ + kHeads * v_stride_) {
    // The products read channels up to a multiple of kColumnsAtOnce: those past the last are zero,
    // in all rows and for good. The first tile's barrier makes them visible.
    const int kv_rows = parameters.stages * parameters.tile_keys;
    clear_columns(q_tile_, kHeads, stride_, parameters.qk_dim);
    clear_columns(d_out_tile_, kHeads, v_stride_, parameters.v_dim);
    clear_columns(kv_tiles_, kv_rows, stride_, parameters.qk_dim);
  }

  /// `row` is counted within the launch. Ends with a barrier.
  __device__ void run(std::int64_t row, std::int64_t first_head, int split) {
    row_ = row;
    t_ = parameters_.first_row + row;
    first_head_ = first_head;
    const RowSlots slots = parameters_.slots.row(row);
    const int tile_keys = parameters_.tile_keys;
    const int all_tiles = slots.count / tile_keys + (slots.count % tile_keys != 0 ? 1 : 0);
    const int split_tiles = (all_tiles + parameters_.splits - 1) / parameters_.splits;
    const int first_tile = min(split * split_tiles, all_tiles);
    const int behind_tile = min(first_tile + split_tiles, all_tiles);

    load_heads();
    Gather<T, kThreadCount> gather(parameters_, slots, first_tile);
    if (first_tile < behind_tile) gather.start(first_tile, kv_tiles_, shared_.key[0]);
    compute_constants();
#pragma unroll
    for (int i = 0; i < kPairs; ++i) clear_accumulators(d_q_[i]);

    bool has_keys = false;
    for (int tile = first_tile; tile < behind_tile; ++tile) {
      const int stage = parameters_.stages == 1 ? 0 : (tile - first_tile) % 2;
      const T* const kv_tile = kv_tiles_ + stage * tile_keys * stride_;
      // Rows of heads and keys and the heads' constants are there for all; all are done with the
      // previous tile, so its stage is free for the next one, and P and dS for this one.
      wait_for_copies<0>();
      const bool tile_has_keys = __syncthreads_or(gather.has_key() ? 1 : 0) != 0;
      if (parameters_.stages == 2 && tile + 1 < behind_tile) {
        gather.start(tile + 1, kv_tiles_ + (stage ^ 1) * tile_keys * stride_,
                     shared_.key[stage ^ 1]);
      }
      if (tile_has_keys) {
        has_keys = true;
        const int blocks = (min(slots.count - tile * tile_keys, tile_keys) + 15) / 16;
        if (key_warp() < blocks) compute_scores(kv_tile, shared_.key[stage]);
        __syncthreads();  // P and dS are there
        if (parameters_.d_q != nullptr) add_to_query(kv_tile, blocks);
        if (parameters_.key_gradient != KeyGradient::none) {
          add_to_keys(shared_.key[stage], std::int64_t{tile} * tile_keys, blocks);
        }
      }
      if (parameters_.stages == 1 && tile + 1 < behind_tile) {
        __syncthreads();  // all are done with this tile's rows and keys
        gather.start(tile + 1, kv_tiles_, shared_.key[0]);
      }
    }

    const int thread = static_cast<int>(threadIdx.x);
    if (parameters_.d_sink != nullptr && has_keys && thread < kHeads &&
        first_head + thread < parameters_.heads) {
      atomicAdd(parameters_.d_sink + first_head + thread, shared_.constants[thread].d_sink);
    }
    store_d_q();
    wait_for_copies<0>();  // of heads, where there was no tile
    __syncthreads();       // the next row's heads and constants overwrite this one's
  }

 private:
  static constexpr int kThreadCount = kThreads<kHeads>;
  static constexpr int kWarps = kThreadCount / 32;
  static constexpr int kHeadBlocks = kHeads / 16;
  static constexpr int kScoreBlocks = kHeadBlocks / (kWarps / kKeyWarps);  // of heads, a warp's
  static constexpr int kKeysAtOnce = 32;                                   // of d_kv

  __device__ static int warp() { return static_cast<int>(threadIdx.x) / 32; }
  __device__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }
  /// Which 16 keys of a tile this warp scores.
  __device__ static int key_warp() { return warp() % kKeyWarps; }

  __device__ static void clear_columns(T* tile, int rows, int stride, int dim) {
    const int columns = padded_dim(dim) - dim;
    for (int i = static_cast<int>(threadIdx.x); i < rows * columns; i += kThreadCount) {
      tile[i / columns * stride + dim + i % columns] = from_float<T>(0);
    }
  }

  __device__ void load_heads() {
    const T* const q = static_cast<const T*>(parameters_.q) + t_ * parameters_.q_token_stride;
    const T* const d_out =
        static_cast<const T*>(parameters_.d_out) + t_ * parameters_.d_out_token_stride;
    const int lane_of_row = static_cast<int>(threadIdx.x) % kLanesPerRow;
    for (int row = static_cast<int>(threadIdx.x) / kLanesPerRow; row < kHeads;
         row += kThreadCount / kLanesPerRow) {
      const std::int64_t h = first_head_ + row;
      const bool has_head = h < parameters_.heads;
      copy_row(q_tile_ + row * stride_, has_head ? q + h * parameters_.q_head_stride : nullptr,
               parameters_.qk_dim, parameters_.q_aligned, lane_of_row);
      copy_row(d_out_tile_ + row * v_stride_,
               has_head ? d_out + h * parameters_.d_out_head_stride : nullptr, parameters_.v_dim,
               parameters_.d_out_aligned, lane_of_row);
    }
    commit_copies();
  }

  __device__ void compute_constants() {
    for (int row = warp(); row < kHeads; row += kWarps) {
      HeadConstants constants{};
      if (first_head_ + row < parameters_.heads) {
        constants = constants_of_head<T>(parameters_, t_, first_head_ + row);
      }
      if (lane() == 0) shared_.constants[row] = constants;
    }
  }

  /// Computes P and dS of this warp's 16 keys and its heads; 0 without a key and past the last
  /// head.
  __device__ void compute_scores(const T* kv_tile, const std::int32_t* keys) {
    const int first_key = key_warp() * 16;
    const int first_head = warp() / kKeyWarps * kScoreBlocks * 16;
    const T* const k = kv_tile + first_key * stride_;
    float s[kScoreBlocks][2][4];
    clear_accumulators(s);
#pragma unroll 2
    for (int d = 0; d < padded_dim(parameters_.qk_dim); d += kColumnsAtOnce) {
      multiply_tile<kColumnsAtOnce, true, true>(s, q_tile_ + first_head * stride_ + d, stride_,
                                                k + d, stride_);
    }
    float d_p[kScoreBlocks][2][4];
    clear_accumulators(d_p);
#pragma unroll 2
    for (int d = 0; d < padded_dim(parameters_.v_dim); d += kColumnsAtOnce) {
      multiply_tile<kColumnsAtOnce, true, true>(d_p, d_out_tile_ + first_head * v_stride_ + d,
                                                v_stride_, k + d, stride_);
    }
    bool is_key[2][2];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        is_key[n][e] = keys[first_key + n * 8 + column_in_block(lane(), e)] >= 0;
      }
    }
#pragma unroll
    for (int i = 0; i < kScoreBlocks; ++i) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int head = first_head + i * 16 + row_in_block(lane(), r * 2);
        const HeadConstants constants = shared_.constants[head];
        const bool has_head = first_head_ + head < parameters_.heads;
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          float of_all[2];  // P
          float of_score[2];
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const float product = s[i][n][r * 2 + e];
            const bool counts =
                has_head && is_key[n][e] && product * parameters_.scale != -INFINITY;
            const float of_keys =
                counts ? probability<T>(fmaf(product, parameters_.scale, -constants.lse)) : 0;
            const float gradient = fmaf(constants.share, d_p[i][n][r * 2 + e], constants.offset);
            // 0 without a key, whatever the constants are.
            of_all[e] = of_keys == 0 ? 0 : of_keys * constants.share;
            of_score[e] = of_keys == 0 ? 0 : of_keys * gradient * parameters_.scale;
          }
          const int key = first_key + n * 8 + column_in_block(lane(), 0);
          put_pair(&shared_.p[head][key], of_all[0], of_all[1]);
          put_pair(&shared_.d_s[head][key], of_score[0], of_score[1]);
        }
      }
    }
  }

  /// d_q [heads, columns] += dS [heads, keys] K [keys, columns].
  __device__ void add_to_query(const T* kv_tile, int blocks) {
#pragma unroll 1
    for (int block = 0; block < blocks; ++block) {
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        const int column = (warp() + i * kWarps) * 16;
        if (column < parameters_.qk_dim) {
          multiply_tile<16, true, false>(d_q_[i], &shared_.d_s[0][block * 16], Storage::kStride,
                                         kv_tile + block * 16 * stride_ + column, stride_);
        }
      }
    }
  }

  /// Emits dS [heads, keys]^T Q [heads, columns] + P [heads, keys]^T dO [heads, columns] to the
  /// keys. After an odd number of blocks 16 keys have no scores; they are no keys, so nothing is
  /// emitted.
  __device__ void add_to_keys(const std::int32_t* keys, std::int64_t first_slot, int blocks) {
    const int key_parts = (blocks + 1) / 2;
    const int parts = padded_dim(parameters_.qk_dim) / kColumnsAtOnce * key_parts;
#pragma unroll 1
    for (int part = warp(); part < parts; part += kWarps) {
      const int first_key = part % key_parts * kKeysAtOnce;
      const int first_column = part / key_parts * kColumnsAtOnce;
      float sums[kKeysAtOnce / 16][kColumnsAtOnce / 8][4];
      clear_accumulators(sums);
      multiply_tile<kHeads, false, false>(sums, &shared_.d_s[0][first_key], Storage::kStride,
                                          q_tile_ + first_column, stride_);
      if (first_column < parameters_.v_dim) {
        multiply_tile<kHeads, false, false>(sums, &shared_.p[0][first_key], Storage::kStride,
                                            d_out_tile_ + first_column, v_stride_);
      }
      // Four lanes emit 16 columns of a row. A lane has a pair in each of two blocks of 8; even
      // lanes take the first block's pair from their neighbour, odd lanes the second's, so that
      // each lane has four columns.
      const bool is_odd = lane() % 2 != 0;
      const int column = first_column + (is_odd ? 8 : 0) + lane() % 4 / 2 * 4;
#pragma unroll
      for (int i = 0; i < kKeysAtOnce / 16; ++i) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int row = first_key + i * 16 + row_in_block(lane(), r * 2);
          const std::int32_t key = row < parameters_.tile_keys ? keys[row] : -1;
          float* const to = parameters_.d_kv + row_of_gradient(key, first_slot + row);
#pragma unroll
          for (int n = 0; n < kColumnsAtOnce / 8; n += 2) {
            const float* const first = &sums[i][n][r * 2];
            const float* const second = &sums[i][n + 1][r * 2];
            const float2 own = {is_odd ? second[0] : first[0], is_odd ? second[1] : first[1]};
            const float2 got = {__shfl_xor_sync(kAllLanes, is_odd ? first[0] : second[0], 1),
                                __shfl_xor_sync(kAllLanes, is_odd ? first[1] : second[1], 1)};
            if (key >= 0 && column + n * 8 < parameters_.qk_dim) {
              emit_key(to + column + n * 8, is_odd ? float4{got.x, got.y, own.x, own.y}
                                                   : float4{own.x, own.y, got.x, got.y});
            }
          }
        }
      }
    }
  }

  /// The offset of a key's gradient, or of a slot's term.
  __device__ std::int64_t row_of_gradient(std::int32_t key, std::int64_t slot) const {
    if (parameters_.key_gradient == KeyGradient::added) return key * parameters_.d_kv_stride;
    return (row_ * parameters_.slots.slots + slot) * parameters_.d_kv_stride;
  }

  __device__ void emit_key(float* to, float4 x) const {
    if (parameters_.key_gradient == KeyGradient::added) {
      add_four(to, x, parameters_.d_kv_aligned);
      return;
    }
    float4& term = *reinterpret_cast<float4*>(to);
    if (parameters_.key_gradient == KeyGradient::stored_too) {
      const float4 before = term;
      x = {before.x + x.x, before.y + x.y, before.z + x.z, before.w + x.w};
    }
    term = x;
  }

  __device__ void store_d_q() {
    if (parameters_.d_q == nullptr) return;
    T* const d_q = static_cast<T*>(parameters_.d_q) + t_ * parameters_.d_q_token_stride;
#pragma unroll
    for (int m = 0; m < kHeadBlocks; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const std::int64_t h = first_head_ + m * 16 + row_in_block(lane(), r * 2);
        if (h >= parameters_.heads) continue;
        T* const to = d_q + h * parameters_.d_q_head_stride;
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
#pragma unroll
          for (int n = 0; n < 2; ++n) {
            const int column = (warp() + i * kWarps) * 16 + n * 8 + column_in_block(lane(), 0);
            if (column >= parameters_.qk_dim) continue;
            const float first = d_q_[i][m][n][r * 2];
            const float second = d_q_[i][m][n][r * 2 + 1];
            if constexpr (std::is_same_v<T, float>) {
              to[column] = first;
              to[column + 1] = second;
            } else {
              store_pair(to + column, first, second, parameters_.d_q_aligned);
            }
          }
        }
      }
    }
  }

  const BackwardParameters& parameters_;
  Storage& shared_;
  int stride_, v_stride_;
  T* q_tile_;
  T* d_out_tile_;
  T* kv_tiles_;
  std::int64_t row_ = 0;
  std::int64_t t_ = 0;
  std::int64_t first_head_ = 0;
  float d_q_[kPairs][kHeadBlocks][2][4];
};

/// Minimum resident blocks per SM (`__launch_bounds__`): as many as leave each enough registers.
template <int kHeads, int kPairs>
constexpr int min_blocks() {
  if (kHeads == 16) return kPairs <= 2 ? 4 : kPairs <= 4 ? 3 : kPairs <= 8 ? 2 : 1;
  return kHeads / 16 * kPairs <= 4 ? 2 : 1;
}

template <class T, int kHeads, int kPairs>
__global__ void __launch_bounds__(kThreads<kHeads>, (min_blocks<kHeads, kPairs>()))
    sparse_attention_backward_general_kernel(
        const __grid_constant__ BackwardParameters parameters) {
  extern __shared__ __align__(16) unsigned char memory[];
  RowGradient<T, kHeads, kPairs> gradient(parameters, memory);
  const std::int64_t items = parameters.rows * parameters.groups * parameters.splits;
  for (std::int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    const auto split = static_cast<int>(item % parameters.splits);
    const std::int64_t group = item / parameters.splits % parameters.groups;
    gradient.run(item / parameters.splits / parameters.groups,
                 parameters.first_head + group * kHeads, split);
  }
}

}  // namespace winnow::cuda::sparse_attention::backward_general
