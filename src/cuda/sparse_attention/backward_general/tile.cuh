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
#include "cuda/sparse_attention/backward_general/heads.cuh"
#include "cuda/sparse_attention/backward_general/rows.cuh"
#include "cuda/sparse_attention/score_product.cuh"

namespace winnow::cuda::sparse_attention::backward_general {

/// The tiles of q [kHeads, row_elements(qk_dim)], d_out [kHeads, row_elements(v_dim)] and kv
/// [stages, tile_keys, row_elements(qk_dim)] follow it.
template <class T, int kHeads, int kMaxKeys>
struct alignas(16) SharedStorage {
  static constexpr int kStride = kMaxKeys + 16 / sizeof(T);

  alignas(16) T p[kHeads][kStride];
  alignas(16) T d_s[kHeads][kStride];  // times the scale
  HeadConstants constants[kHeads];
  std::int32_t key[kMaxStages][kMaxKeys];  // the key of each slot; -1: none, as past tile_keys
};

/// kPairs: pairs of blocks of 8 columns of d_q that a warp has. kMaxKeys: of a tile.
template <class T, int kHeads, int kPairs, int kMaxKeys>
class RowGradient {
 public:
  using Storage = SharedStorage<T, kHeads, kMaxKeys>;

  __device__ RowGradient(const BackwardParameters& parameters, unsigned char* memory)
      : parameters_(parameters),
        shared_(*reinterpret_cast<Storage*>(memory)),
        stride_(row_elements<T>(parameters.qk_dim)),
        v_stride_(v_row_elements<T>(parameters.v_dim)),
        q_tile_(reinterpret_cast<T*>(memory + sizeof(Storage))),
        d_out_tile_(q_tile_ + kHeads * stride_),
        kv_tiles_(d_out_tile_ + kHeads * v_stride_) {
    // The products read channels up to a multiple of 16, those of d_out to one of kColumnsAtOnce:
    // those past the last are zero, in all rows and for good. The first tile's barrier makes them
    // visible.
    const int kv_rows = parameters.stages * parameters.tile_keys;
    const int qk_end = padded_dim(parameters.qk_dim);
    clear_columns<T, kThreadCount>(q_tile_, kHeads, stride_, parameters.qk_dim, qk_end);
    clear_columns<T, kThreadCount>(d_out_tile_, kHeads, v_stride_, parameters.v_dim,
                                   padded_v_dim(parameters.v_dim));
    clear_columns<T, kThreadCount>(kv_tiles_, kv_rows, stride_, parameters.qk_dim, qk_end);
    for (int i = static_cast<int>(threadIdx.x); i < kMaxStages * kMaxKeys; i += kThreadCount) {
      if (i % kMaxKeys >= parameters.tile_keys) shared_.key[i / kMaxKeys][i % kMaxKeys] = -1;
    }
  }

  __device__ void run(const Item& item) {
    item_ = item;
    const RowSlots slots = parameters_.slots.row(item.row);
    const int tile_keys = parameters_.tile_keys;
    const int all_tiles = slots.count / tile_keys + (slots.count % tile_keys != 0 ? 1 : 0);
    const int split_tiles = (all_tiles + parameters_.splits - 1) / parameters_.splits;
    const int first_tile = min(item.split * split_tiles, all_tiles);
    const int behind_tile = min(first_tile + split_tiles, all_tiles);

    heads().template load<kThreadCount>();
    Gather<T, kHeads, kThreadCount, kMaxKeys> gather(parameters_, slots, first_tile);
    if (first_tile < behind_tile) {
      gather.start(kv_tiles_, shared_.key[0]);
      gather.load(first_tile + 1);
    }
    heads().template compute_constants<kWarps>(shared_.constants);
#pragma unroll
    for (int i = 0; i < kPairs; ++i) clear_accumulators(d_q_[i]);

    for (int tile = first_tile; tile < behind_tile; ++tile) {
      const int stage = parameters_.stages == 1 ? 0 : (tile - first_tile) % 2;
      const T* const kv_tile = kv_tiles_ + stage * tile_keys * stride_;
      // Rows of heads and keys and the heads' constants are there for all; all are done with the
      // previous tile, so its stage is free for the next one, and P and dS for this one.
      wait_for_copies<0>();
      const bool tile_has_keys = __syncthreads_or(gather.has_key() ? 1 : 0) != 0;
      if (parameters_.stages == 2 && tile + 1 < behind_tile) {
        gather.start(kv_tiles_ + (stage ^ 1) * tile_keys * stride_, shared_.key[stage ^ 1]);
        gather.load(tile + 2);
      }
      if (tile_has_keys) {
        const int blocks = (min(slots.count - tile * tile_keys, tile_keys) + 15) / 16;
        if constexpr (kInPairs) {
          compute_scores_in_pairs(kv_tile, shared_.key[stage]);
        } else if (key_warp() < blocks) {
          compute_scores(kv_tile, shared_.key[stage]);
        }
        __syncthreads();  // P and dS are there
        if (parameters_.d_q != nullptr) add_to_query(kv_tile, blocks);
        if (parameters_.key_gradient != KeyGradient::none) {
          add_to_keys(shared_.key[stage], tile * tile_keys, blocks);
        }
      }
      if (parameters_.stages == 1 && tile + 1 < behind_tile) {
        __syncthreads();  // all are done with this tile's rows and keys
        gather.start(kv_tiles_, shared_.key[0]);
        gather.load(tile + 2);
      }
    }

    heads().add_to_sinks(shared_.constants);
    heads().template store_d_q<kWarps>(d_q_);
    wait_for_copies<0>();  // of heads, where there was no tile
  }

 private:
  static constexpr int kThreadCount = kThreads<kHeads>;
  static constexpr int kSize = sizeof(T);
  static constexpr int kWarps = kThreadCount / 32;
  static constexpr int kHeadBlocks = kHeads / 16;
  static constexpr int kKeyWarps = kMaxKeys / 16;  // that share the heads of a tile
  static constexpr int kScoreBlocks = kHeadBlocks / (kWarps / kKeyWarps);  // of heads, a warp's
  static constexpr int kKeysAtOnce = 32;                                   // of d_kv
  // Two warps have 16 heads and 32 keys: one makes S, the other dP.
  static constexpr bool kInPairs = sizeof(T) == 2 && kMaxKeys == 32 && kWarps == 2 * kHeadBlocks;

  __device__ Heads<T, kHeads, Storage::kStride> heads() const {
    return {parameters_, item_,     q_tile_,          d_out_tile_,
            stride_,     v_stride_, &shared_.p[0][0], &shared_.d_s[0][0]};
  }
  __device__ static int warp() { return static_cast<int>(thread_number<kHeads>() / 32); }
  __device__ static int lane() { return static_cast<int>(thread_number<kHeads>() % 32); }
  /// Which 16 keys of a tile this warp scores.
  __device__ static int key_warp() { return warp() % kKeyWarps; }

  /// Computes P and dS of this warp's 16 keys and its heads; 0 without a key and past the last
  /// head.
  __device__ void compute_scores(const T* kv_tile, const std::int32_t* keys) {
    const int own_warp = warp();
    const int first_key = own_warp % kKeyWarps * 16;
    const int first_head = own_warp / kKeyWarps * kScoreBlocks * 16;
    const T* const k = kv_tile + first_key * stride_;
    float s[kScoreBlocks][2][4];
    clear_accumulators(s);
#pragma unroll 4
    for (int d = 0; d < padded_dim(parameters_.qk_dim); d += 16) {
      multiply_tile<16, true, true>(s, q_tile_ + first_head * stride_ + d, stride_, k + d, stride_);
    }
    float d_p[kScoreBlocks][2][4];
    clear_accumulators(d_p);
#pragma unroll 4
    for (int d = 0; d < padded_dim(parameters_.v_dim); d += 16) {
      multiply_tile<16, true, true>(d_p, d_out_tile_ + first_head * v_stride_ + d, v_stride_, k + d,
                                    stride_);
    }
#pragma unroll
    for (int i = 0; i < kScoreBlocks; ++i) {
      store_scores(s[i], d_p[i], first_head + i * 16, first_key, keys);
    }
  }

  /// The same by two warps that have 16 heads and all 32 keys of a tile: one makes S, the other dP;
  /// then the first has P and dS of the first 16 keys, the other those of the second.
  __device__ void compute_scores_in_pairs(const T* kv_tile, const std::int32_t* keys) {
    const int own_lane = lane();
    const int own_warp = warp();
    const int first_head = own_warp % kHeadBlocks * 16;
    const bool is_second = own_warp >= kHeadBlocks;
    const int stride = is_second ? v_stride_ : stride_;
    const T* const rows = (is_second ? d_out_tile_ : q_tile_) + first_head * stride;
    const int dim = padded_dim(is_second ? parameters_.v_dim : parameters_.qk_dim);
    float products[4][4];
    multiply_rows<T, 1, 0>(
        products, {}, fragment_address(shared_address(rows), stride * kSize, rows_first(own_lane)),
        fragment_address(shared_address(kv_tile), stride_ * kSize, columns_first(own_lane)),
        stride_ * kSize, dim / 16);
    // What the other warp needs goes through the two warps' rows of P and dS.
    float4* const given = reinterpret_cast<float4*>(is_second ? &shared_.d_s[first_head][0]
                                                              : &shared_.p[first_head][0]);
    const float4* const taken = reinterpret_cast<const float4*>(
        is_second ? &shared_.p[first_head][0] : &shared_.d_s[first_head][0]);
    float others[2][4];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float(&x)[4] = products[n];
      const float(&y)[4] = products[n + 2];
      given[n * 32 + own_lane] =
          is_second ? float4{x[0], x[1], x[2], x[3]} : float4{y[0], y[1], y[2], y[3]};
    }
    wait_for_pair();  // the products are there
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float4 x = taken[n * 32 + own_lane];
      others[n][0] = x.x;
      others[n][1] = x.y;
      others[n][2] = x.z;
      others[n][3] = x.w;
    }
    wait_for_pair();  // both have read, and P and dS may overwrite
    float s[2][4];
    float d_p[2][4];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        s[n][e] = is_second ? others[n][e] : products[n][e];
        d_p[n][e] = is_second ? products[n + 2][e] : others[n][e];
      }
    }
    store_scores(s, d_p, first_head, is_second ? 16 : 0, keys);
  }

  /// A barrier of the two warps that share 16 heads.
  __device__ static void wait_for_pair() {
    asm volatile("bar.sync %0, 64;" ::"r"(1 + warp() % kHeadBlocks) : "memory");
  }

  /// Stores P and dS of 16 heads and 16 keys.
  __device__ void store_scores(const float (&s)[2][4], const float (&d_p)[2][4], int first_head,
                               int first_key, const std::int32_t* keys) {
    const int own_lane = lane();
    bool is_key[2][2];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        is_key[n][e] = keys[first_key + n * 8 + column_in_block(own_lane, e)] >= 0;
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int head = first_head + row_in_block(own_lane, r * 2);
      const HeadConstants constants = shared_.constants[head];
      const bool has_head = item_.first_head + head < parameters_.heads;
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        KeyTerms terms[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float product = s[n][r * 2 + e];
          const bool counts = has_head && is_key[n][e] && product * parameters_.scale != -INFINITY;
          const float of_keys =
              counts ? probability<T>(fmaf(product, parameters_.scale, -constants.lse)) : 0;
          terms[e] = key_terms(parameters_, constants, of_keys, d_p[n][r * 2 + e]);
        }
        const int key = first_key + n * 8 + column_in_block(own_lane, 0);
        put_pair(&shared_.p[head][key], terms[0].p, terms[1].p);
        put_pair(&shared_.d_s[head][key], terms[0].d_s, terms[1].d_s);
      }
    }
  }

  /// d_q [heads, columns] += dS [heads, keys] K [keys, columns].
  __device__ void add_to_query(const T* kv_tile, int blocks) {
    const int own_warp = warp();
    const BlockOffset corner = rows_first(lane());
    const std::uint32_t d_s_row =
        fragment_address(shared_address(shared_.d_s), Storage::kStride * kSize, corner);
    std::uint32_t k_row =
        fragment_address(shared_address(kv_tile), stride_ * kSize, corner) + own_warp * 16 * kSize;
#pragma unroll 1
    for (int block = 0; block < blocks; ++block) {
      const T* const rows = kv_tile + block * 16 * stride_;
      if constexpr (sizeof(T) == 2) {
        std::uint32_t d_s[kHeadBlocks][4];
#pragma unroll
        for (int m = 0; m < kHeadBlocks; ++m) {
          load_fragments_at(d_s[m], d_s_row + (m * 16 * Storage::kStride + block * 16) * kSize);
        }
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
          const int column = (own_warp + i * kWarps) * 16;
          if (column >= parameters_.qk_dim) break;
          std::uint32_t k[4];
          load_transposed_at(k, k_row + i * kWarps * 16 * kSize);
#pragma unroll
          for (int m = 0; m < kHeadBlocks; ++m) {
            multiply_add<T>(d_q_[i][m][0], d_s[m], k[0], k[1]);
            multiply_add<T>(d_q_[i][m][1], d_s[m], k[2], k[3]);
          }
        }
        k_row += 16 * stride_ * kSize;
      } else {
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
          const int column = (own_warp + i * kWarps) * 16;
          if (column < parameters_.qk_dim) {
            multiply_tile<16, true, false>(d_q_[i], &shared_.d_s[0][block * 16], Storage::kStride,
                                           rows + column, stride_);
          }
        }
      }
    }
  }

  /// Emits dS [heads, keys]^T Q [heads, columns] + P [heads, keys]^T dO [heads, columns] to the
  /// keys. After an odd number of blocks 16 keys have no scores; they are no keys, so nothing is
  /// emitted.
  __device__ void add_to_keys(const std::int32_t* keys, int first_slot, int blocks) {
    // A tile has one or two parts of 32 keys, so that a shift divides by their number.
    static_assert(kMaxKeys <= 2 * kKeysAtOnce);
    const int shift = kMaxKeys > kKeysAtOnce && blocks > 2 ? 1 : 0;
    const int column_blocks = padded_dim(parameters_.qk_dim) / 16;
    const int parts = column_blocks / 2 << shift;
    const int whole_parts = parts / kWarps * kWarps;
#pragma unroll 1
    for (int part = warp(); part < whole_parts; part += kWarps) {
      heads().template add_to_keys<kKeysAtOnce, kColumnsAtOnce>(
          (part & shift) * kKeysAtOnce, (part >> shift) * kColumnsAtOnce, keys, first_slot);
    }
    // Parts that are too few for all warps are cut into blocks of 16 keys and 16 columns, and so is
    // a last block of columns.
    const int cut = (parts - whole_parts) * 4;
    const int all = cut + (column_blocks % 2 == 0 ? 0 : 2 << shift);
#pragma unroll 1
    for (int i = warp(); i < all; i += kWarps) {
      const int part = whole_parts + i / 4;
      const bool is_cut = i < cut;
      const int key = is_cut ? (part & shift) * kKeysAtOnce + i % 2 * 16 : (i - cut) * 16;
      const int column =
          is_cut ? (part >> shift) * kColumnsAtOnce + i / 2 % 2 * 16 : (column_blocks - 1) * 16;
      heads().template add_to_keys<16, 16>(key, column, keys, first_slot);
    }
  }

  const BackwardParameters& parameters_;
  Storage& shared_;
  int stride_, v_stride_;
  T* q_tile_;
  T* d_out_tile_;
  T* kv_tiles_;
  Item item_{};
  float d_q_[kPairs][kHeadBlocks][2][4];
};

/// Minimum resident blocks per SM (`__launch_bounds__`): as many as leave each enough registers.
template <int kHeads, int kPairs>
constexpr int min_blocks() {
  if (kHeads == 16) return kPairs <= 2 ? 4 : kPairs <= 4 ? 3 : kPairs <= 8 ? 2 : 1;
  return kHeads / 16 * kPairs <= 4 ? 2 : 1;
}

template <class T, int kHeads, int kPairs, int kMaxKeys = 64>
__global__ void __launch_bounds__(kThreads<kHeads>, (min_blocks<kHeads, kPairs>()))
    sparse_attention_backward_general_kernel(
        const __grid_constant__ BackwardParameters parameters) {
  extern __shared__ __align__(16) unsigned char memory[];
  RowGradient<T, kHeads, kPairs, kMaxKeys> gradient(parameters, memory);
  gradient.run(item_of_block<kHeads>(parameters));
}

}  // namespace winnow::cuda::sparse_attention::backward_general
