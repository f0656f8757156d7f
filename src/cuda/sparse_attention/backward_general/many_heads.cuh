// SPDX-License-Identifier: Apache-2.0
// Sparse attention, backward, for 64 heads of a query in tiles of 32 keys, with rows of up to 576
// elements: the gradients that one query row gives.
//
// Q and d_out of the heads stay in shared memory, beside two stages of keys. With P and dS of tile
// i in shared memory, 12 warps do between barriers:
// clang-format off
//   all           d_q += dS K of tile i; a warp has all heads and every 12th block of 16 columns.
//   4 score warps S = Q K^T and dP = dO V^T of tile i + 1, a warp has 16 heads; P and dS wait in
//                 registers until the others are done with those of tile i.
//   8 key warps   gather tile i + 2 into the stage of tile i; d_kv = dS^T Q + P^T dO of tile i, a
//                 warp has 32 keys and 32 columns at a time, which go to device memory.
// clang-format on
// So the atomics run beside the products of the next tile. There are three barriers a tile.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/common/block_barrier.cuh"
#include "cuda/common/mma.cuh"
#include "cuda/common/own_index.cuh"
#include "cuda/common/row_slots.cuh"
#include "cuda/common/tile_product.cuh"
#include "cuda/sparse_attention/backward_general/heads.cuh"
#include "cuda/sparse_attention/backward_general/rows.cuh"
#include "cuda/sparse_attention/score_product.cuh"

namespace winnow::cuda::sparse_attention::backward_general {

template <class T>
class ManyHeadsGradient {
 public:
  static constexpr int kHeads = 64;
  static constexpr int kKeys = 32;
  static constexpr int kKeyWarps = 8;
  static constexpr int kWarps = kKeyWarps + kHeads / 16;
  static constexpr int kThreadCount = kWarps * 32;
  static constexpr int kPairs = 3;  // blocks of 16 columns of d_q that a warp has
  static constexpr int kMaxDim = kPairs * kWarps * 16;
  static constexpr int kKeyBuffers = 3;  // a tile is gathered while the keys of two are used

  /// What the thread block computes. It stays in shared memory and is read where it is used: beside
  /// the gradients registers do not suffice.
  struct Work {
    Item item;
    RowSlots slots;
    int first_tile;
    int tiles;
  };

  /// The tiles of q [kHeads, row_elements], d_out [kHeads, v_row_elements] and kv [2, kKeys,
  /// row_elements] follow it.
  struct alignas(16) Storage {
    static constexpr int kStride = kKeys + kRowPadding;

    alignas(16) T p[kHeads][kStride];
    alignas(16) T d_s[kHeads][kStride];  // times the scale
    HeadConstants constants[kHeads];
    std::int32_t key[kKeyBuffers][kKeys];  // the key of each slot; -1: none
    Work work;
  };

  __device__ ManyHeadsGradient(const BackwardParameters& parameters, unsigned char* memory)
      : parameters_(parameters),
        shared_(*reinterpret_cast<Storage*>(memory)),
        stride_(row_elements<T>(parameters.qk_dim)),
        v_stride_(v_row_elements<T>(parameters.v_dim)),
        q_tile_(reinterpret_cast<T*>(memory + sizeof(Storage))),
        d_out_tile_(q_tile_ + kHeads * stride_),
        kv_tiles_(d_out_tile_ + kHeads * v_stride_) {
    clear_columns<T, kThreadCount>(q_tile_, kHeads, stride_, parameters.qk_dim,
                                   padded_dim(parameters.qk_dim));
    clear_columns<T, kThreadCount>(d_out_tile_, kHeads, v_stride_, parameters.v_dim,
                                   padded_v_dim(parameters.v_dim));
    clear_columns<T, kThreadCount>(kv_tiles_, 2 * kKeys, stride_, parameters.qk_dim,
                                   padded_dim(parameters.qk_dim));
  }

  __device__ void run(const Item& item) {
    heads(item).template load<kThreadCount>();
    if (threadIdx.x == 0) shared_.work = work_of(item);
    wait_for_block<kThreadCount>();  // the work is there
    if (makes_scores()) {
      run_scores();
    } else {
      run_keys();
    }
    heads().add_to_sinks(shared_.constants);
    heads().template store_d_q<kWarps>(d_q_);
  }

 private:
  static constexpr int kSize = sizeof(T);
  /// P and dS of 16 heads and 32 keys, packed in pairs: of rows lane / 4 and lane / 4 + 8.
  struct Scores {
    std::uint32_t p[2][4];
    std::uint32_t d_s[2][4];
  };

  __device__ Work work_of(const Item& item) const {
    const RowSlots slots = parameters_.slots.row(item.row);
    const int all_tiles = slots.count / kKeys + (slots.count % kKeys != 0 ? 1 : 0);
    const int split_tiles = (all_tiles + parameters_.splits - 1) / parameters_.splits;
    const int first_tile = min(item.split * split_tiles, all_tiles);
    return {item, slots, first_tile, min(split_tiles, all_tiles - first_tile)};
  }

  __device__ void run_scores() {
    const Work& work = shared_.work;
    begin();
    // The last tile is scored twice: a condition would keep P and dS in registers all the time.
    if (work.tiles > 0) {
      Scores scores;
      compute_scores(scores, 0);
      store_scores(scores);
    }
    wait_for_block<kThreadCount>();  // P and dS of the first tile are there
    for (int i = 0; i < work.tiles; ++i) {
      add_to_query(rows_of(i));
      wait_for_block<kThreadCount>();  // all are done with the rows of tile i
      Scores scores;
      compute_scores(scores, min(i + 1, work.tiles - 1));
      wait_for_block<kThreadCount>();  // P and dS of tile i have been used; the rows of tile i + 2
                                       // are there
      store_scores(scores);
      wait_for_block<kThreadCount>();  // P and dS of tile i + 1 are there
    }
  }

  __device__ void run_keys() {
    const Work& work = shared_.work;
    Gather<T, kHeads, kKeyWarps * 32, kKeys> gather(parameters_, work.slots, work.first_tile);
    for (int i = 0; i < min(work.tiles, 2); ++i) {
      gather.start(rows_of(i), shared_.key[i]);
      gather.load(work.first_tile + i + 1);
    }
    begin();
    wait_for_block<kThreadCount>();
    for (int i = 0; i < work.tiles; ++i) {
      add_to_query(rows_of(i));
      wait_for_block<kThreadCount>();
      if (i + 2 < work.tiles) {
        gather.start(rows_of(i), shared_.key[(i + 2) % kKeyBuffers]);
      }
      if (parameters_.key_gradient != KeyGradient::none) {
        add_to_keys(shared_.key[i % kKeyBuffers], (work.first_tile + i) * kKeys);
      }
      // They arrive during the next tile's d_q; before d_kv they would take its registers.
      gather.load(work.first_tile + i + 3);
      wait_for_copies<0>();
      wait_for_block<kThreadCount>();
      wait_for_block<kThreadCount>();
    }
  }

  __device__ void begin() {
    heads().template compute_constants<kWarps>(shared_.constants);
#pragma unroll
    for (int i = 0; i < kPairs; ++i) clear_accumulators(d_q_[i]);
    wait_for_copies<0>();
    // The rows of heads and of two tiles are there, and the heads' constants.
    wait_for_block<kThreadCount>();
  }

  /// From threadIdx.x, unlike lane(): read anew it takes more registers.
  __device__ static int warp() { return static_cast<int>(threadIdx.x / 32); }
  __device__ static int lane() { return static_cast<int>(own_thread() % 32); }
  __device__ static bool makes_scores() { return warp() >= kKeyWarps; }
  /// The first of the heads that this score warp has.
  __device__ static int score_head() { return (warp() - kKeyWarps) * 16; }
  __device__ Heads<T, kHeads, Storage::kStride> heads(const Item& item) const {
    return {parameters_, item,      q_tile_,          d_out_tile_,
            stride_,     v_stride_, &shared_.p[0][0], &shared_.d_s[0][0]};
  }
  __device__ Heads<T, kHeads, Storage::kStride> heads() const { return heads(shared_.work.item); }
  __device__ T* rows_of(int i) const { return kv_tiles_ + i % 2 * kKeys * stride_; }

  /// P and dS of this warp's 16 heads; 0 without a key and past the last head.
  __device__ void compute_scores(Scores& scores, int i) {
    const int own_lane = lane();
    const int first_head = score_head();
    const std::int32_t* const keys = shared_.key[i % kKeyBuffers];
    const std::uint32_t k =
        fragment_address(shared_address(rows_of(i)), stride_ * kSize, columns_first(own_lane));
    float s[4][4] = {};
    multiply(s,
             fragment_address(shared_address(q_tile_ + first_head * stride_), stride_ * kSize,
                              rows_first(own_lane)),
             k, padded_dim(parameters_.qk_dim) / 16);
    float d_p[4][4] = {};
    multiply(d_p,
             fragment_address(shared_address(d_out_tile_ + first_head * v_stride_),
                              v_stride_ * kSize, rows_first(own_lane)),
             k, padded_dim(parameters_.v_dim) / 16);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int head = first_head + row_in_block(own_lane, r * 2);
      const HeadConstants constants = shared_.constants[head];
      const bool has_head = shared_.work.item.first_head + head < parameters_.heads;
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        KeyTerms terms[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float product = s[n][r * 2 + e];
          const bool is_key = keys[n * 8 + column_in_block(own_lane, e)] >= 0;
          const bool counts = has_head && is_key && product * parameters_.scale != -INFINITY;
          const float of_keys =
              counts ? probability<T>(fmaf(product, parameters_.scale, -constants.lse)) : 0;
          terms[e] = key_terms(parameters_, constants, of_keys, d_p[n][r * 2 + e]);
        }
        scores.p[r][n] = pack<T>(terms[0].p, terms[1].p);
        scores.d_s[r][n] = pack<T>(terms[0].d_s, terms[1].d_s);
        // Here, not after the barrier that comes before their use.
        asm volatile("" : "+r"(scores.p[r][n]), "+r"(scores.d_s[r][n]));
      }
    }
  }

  /// c += A [16, d] K [32, d]^T, from this lane's fragment addresses. Registers do not suffice to
  /// load operands ahead.
  __device__ void multiply(float (&c)[4][4], std::uint32_t a, std::uint32_t k, int steps) const {
#pragma unroll 2
    for (int step = 0; step < steps; ++step) {
      std::uint32_t rows[4];
      load_fragments_at(rows, a + step * 16 * kSize);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        std::uint32_t keys[4];
        load_fragments_at(keys, k + (n * 16 * stride_ + step * 16) * kSize);
        multiply_add<T>(c[n * 2], rows, keys[0], keys[1]);
        multiply_add<T>(c[n * 2 + 1], rows, keys[2], keys[3]);
      }
    }
  }

  __device__ void store_scores(const Scores& scores) {
    const int own_lane = lane();
    const int first_head = score_head();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int head = first_head + row_in_block(own_lane, r * 2);
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const int key = n * 8 + column_in_block(own_lane, 0);
        *reinterpret_cast<std::uint32_t*>(&shared_.p[head][key]) = scores.p[r][n];
        *reinterpret_cast<std::uint32_t*>(&shared_.d_s[head][key]) = scores.d_s[r][n];
      }
    }
  }

  /// d_q [heads, columns] += dS [heads, keys] K [keys, columns].
  __device__ void add_to_query(const T* rows) {
    if (parameters_.d_q == nullptr) return;
    const int own_warp = warp();
    const BlockOffset corner = rows_first(lane());
    const std::uint32_t d_s_row =
        fragment_address(shared_address(shared_.d_s), Storage::kStride * kSize, corner);
    std::uint32_t k_row =
        fragment_address(shared_address(rows), stride_ * kSize, corner) + own_warp * 16 * kSize;
#pragma unroll
    for (int block = 0; block < kKeys / 16; ++block) {
      std::uint32_t d_s[kHeads / 16][4];
#pragma unroll
      for (int m = 0; m < kHeads / 16; ++m) {
        load_fragments_at(d_s[m], d_s_row + (m * 16 * Storage::kStride + block * 16) * kSize);
      }
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        const int column = (own_warp + i * kWarps) * 16;
        if (column >= parameters_.qk_dim) break;
        std::uint32_t k[4];
        load_transposed_at(k, k_row + i * kWarps * 16 * kSize);
#pragma unroll
        for (int m = 0; m < kHeads / 16; ++m) {
          multiply_add<T>(d_q_[i][m][0], d_s[m], k[0], k[1]);
          multiply_add<T>(d_q_[i][m][1], d_s[m], k[2], k[3]);
        }
      }
      k_row += 16 * stride_ * kSize;
    }
  }

  /// Emits dS [heads, keys]^T Q [heads, columns] + P [heads, keys]^T dO [heads, columns] to the
  /// keys.
  __device__ void add_to_keys(const std::int32_t* keys, int first_slot) {
    const int column_blocks = padded_dim(parameters_.qk_dim) / 16;
    const int whole_parts = column_blocks / 2 / kKeyWarps * kKeyWarps;
#pragma unroll 1
    for (int part = warp(); part < whole_parts; part += kKeyWarps) {
      heads().template add_to_keys<32, 32>(0, part * 32, keys, first_slot);
    }
    // Columns that are too few for all warps go in blocks of 16 keys and 16 columns.
#pragma unroll 1
    for (int i = whole_parts * 4 + warp(); i < column_blocks * 2; i += kKeyWarps) {
      heads().template add_to_keys<16, 16>(i % 2 * 16, i / 2 * 16, keys, first_slot);
    }
  }

  const BackwardParameters& parameters_;
  Storage& shared_;
  int stride_, v_stride_;
  T* q_tile_;
  T* d_out_tile_;
  T* kv_tiles_;
  float d_q_[kPairs][kHeads / 16][2][4];
};

template <class T>
__global__ void __launch_bounds__(ManyHeadsGradient<T>::kThreadCount, 1)
    sparse_attention_backward_many_heads_kernel(
        const __grid_constant__ BackwardParameters parameters) {
  extern __shared__ __align__(16) unsigned char memory[];
  ManyHeadsGradient<T> gradient(parameters, memory);
  gradient.run(item_of_block<ManyHeadsGradient<T>::kHeads>(parameters));
}

}  // namespace winnow::cuda::sparse_attention::backward_general
