// SPDX-License-Identifier: Apache-2.0
// The gradients that one query row of the indexer gives. The map is at the head of
// gradient_sm90.cu.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/common/block_reduce.cuh"
#include "cuda/hopper/bulk_copy.cuh"
#include "cuda/hopper/gather.cuh"
#include "cuda/hopper/quad.cuh"
#include "cuda/index_topk/gradient_sm90/products.cuh"
#include "cuda/index_topk/gradient_sm90/shared.cuh"
#include "cuda/index_topk/gradient_sm90/terms.cuh"
#include "cuda/index_topk/row_scale.cuh"

namespace winnow::cuda::gradient_sm90 {

template <class T, int kHeads, KeyGradient kMode>
class Row {
 public:
  using Storage = SharedStorage<T, kHeads>;

  __device__ Row(const Parameters<T>& params, std::int64_t t, Storage& shared)
      : params_(params),
        t_(t),
        slots_(params.slots.row(t)),
        d_scores_of_row_(params.d_scores + t * params.d_scores_stride),
        weights_of_row_(params.weights + t * params.weights_stride),
        shared_(shared) {}

  __device__ void run() {
    if (threadIdx.x == 0) {
#pragma unroll
      for (int i = 0; i < kStages; ++i) shared_.full[i].init(kThreads);
      fence_barrier_init();
    }
    load_keys(0);
    scale_ = scale_of_row();
    load_weights();
    load_own_slots(0);
    __syncthreads();  // the barriers are there for all
    load_heads();
    gather(0);
    gather(1);
    const int blocks = (slots_.count + kBlock - 1) / kBlock;
#pragma unroll 1
    for (int block = 0; block < blocks; ++block) add_block(block);
    if (blocks == 0) wait_for_own_copies();
    store_d_weights();
    store_d_q();
    wait_for_bulk_reads();  // shared memory must outlive them
  }

 private:
  static constexpr unsigned kAllLanes = 0xffffffffu;
  static constexpr int kHeadBlocks = kHeads / 8;
  static constexpr int kRowGroups = kThreads / 8;  // eight lanes copy 64 columns of a row
  static constexpr int kGathered = kBlock / kRowGroups;

  __device__ static int gathered_row(int i) {
    return static_cast<int>(threadIdx.x) / 8 + i * kRowGroups;
  }

  // ---- Loads.

  __device__ void load_keys(int block) {
#pragma unroll
    for (int i = 0; i < kGathered; ++i) {
      next_keys_[i] = slots_.key(std::int64_t{block} * kBlock + gathered_row(i));
    }
  }

  /// Starts to copy 64 columns at a time of a row, zeros where it has none.
  __device__ void copy_row(std::byte* tiles, int tile_bytes, int row, const T* from, bool valid) {
    const int piece = static_cast<int>(threadIdx.x) % 8;
    const std::uint32_t to = shared_address(tiles) + tile_offset(row, piece);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const int column = tile * kTileColumns + piece * 8;
      copy_16_bytes(to + tile * tile_bytes, from + column, valid && column < params_.dim);
    }
  }

  __device__ void load_heads() {
#pragma unroll
    for (int i = 0; i < kHeads / kRowGroups; ++i) {
      const int h = gathered_row(i);
      const bool has_head = h < params_.heads;
      const T* const from =
          params_.q + t_ * params_.q_token_stride + (has_head ? h : 0) * params_.q_head_stride;
      copy_row(shared_.q[0], sizeof(shared_.q[0]), h, from, has_head);
    }
  }

  /// Copies a block, whose keys were loaded one call ago, and loads the next block's keys.
  __device__ void gather(int block) {
    if (block * kBlock >= slots_.count) return;
    const int stage = block % kStages;
#pragma unroll
    for (int i = 0; i < kGathered; ++i) {
      const std::int32_t key = next_keys_[i];
      copy_row(shared_.k[stage][0], kTileBytes, gathered_row(i),
               params_.k + (key < 0 ? 0 : key) * params_.k_stride, key >= 0);
    }
    shared_.full[stage].arrive_after_copies();
    load_keys(block + 1);
  }

  /// The row of a key of a block, or -1.
  __device__ std::int32_t key_of(int block, int row) const {
    return slots_.key(std::int64_t{block} * kBlock + row);
  }

  /// Loads what this lane needs of a block's slots.
  __device__ void load_own_slots(int block) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const std::int64_t slot = std::int64_t{block} * kBlock + row_of(half);
      const float d_score = slot < slots_.count ? __ldg(d_scores_of_row_ + slot) : 0;
      next_d_scores_[half] = slots_.key(slot) >= 0 ? d_score : 0;
    }
    next_emitted_key_ = key_of(block, warp() * 16 + lane() % 16);
  }

  __device__ float weight(int h) const { return h < params_.heads ? weights_of_row_[h] : 0; }

  /// The scales of a row; 1 where the type has the range of fp32.
  __device__ RowScale scale_of_row() {
    if constexpr (!std::is_same_v<T, __half>) {
      return {};
    } else {
      const auto larger = [](float a, float b) { return fmaxf(a, b); };
      const int thread = static_cast<int>(threadIdx.x);
      float d_score = 0;
      for (int slot = thread; slot < slots_.count; slot += kThreads) {
        if (slots_.key(slot) >= 0) {
          d_score = fmaxf(d_score, finite_magnitude(d_scores_of_row_[slot]));
        }
      }
      const float of_head = thread < kHeads ? finite_magnitude(weight(thread)) : 0;
      return {1 / power_of_two_below(reduce_block<kThreads>(d_score, shared_.reduction, larger)),
              power_of_two_below(reduce_block<kThreads>(of_head, shared_.reduction, larger))};
    }
  }

  __device__ void load_weights() {
    const float factor = 1 / scale_.weight;
#pragma unroll
    for (int n = 0; n < kHeadBlocks; ++n) {
      weights_[n] = pack<T>(weight(column_of(n, 0)) * factor, weight(column_of(n, 1)) * factor);
    }
  }

  // ---- A block of keys.

  __device__ void add_block(int block) {
    const int stage = block % kStages;
    const std::int32_t emitted_key = next_emitted_key_;
#pragma unroll
    for (int half = 0; half < 2; ++half) d_scores_[half] = next_d_scores_[half];
    shared_.full[stage].wait(block / kStages);
    fence_proxy_async();
    float a[kHeads / 2];
    multiply_heads(stage, a);
    load_own_slots(block + 1);
    const bool is_finite = add_to_d_weights(block, a);
    wait_for_bulk_reads();
    __syncthreads();  // d_k of the previous block has been read, so that d_scores may be written
    std::uint32_t weights[kHeads / 16][4];
    take_positive(a, weights);
    fence_proxy_async();
    // After this barrier the d_scores of positive products are there for all.
    const bool all_finite = __syncthreads_or(is_finite ? 0 : 1) == 0;
    if (all_finite) {
      multiply_query(stage);
    } else {
      list_positive<kHeads>(a, shared_.positive);
      __syncthreads();
      add_query_terms(shared_, stage, d_q_);
    }
    __syncthreads();  // the stage and the scores are free
    gather(block + kStages);
#pragma unroll 1
    for (int tile = 0; tile < kTiles; ++tile) {
      float d_k[32];
      if (all_finite) {
        multiply_keys(tile, weights, d_k);
      } else {
        add_key_terms(shared_, tile, params_.heads, weights_of_row_, 1 / scale_.weight, d_k);
      }
      put_keys(tile, d_k);
    }
    emit_keys(block, emitted_key);
  }

  /// a = k q^T [keys, heads].
  __device__ void multiply_heads(int stage, float (&a)[kHeads / 2]) {
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kTiles * 4; ++i) {
      multiply_by_heads<T, 0>(
          a, k_major(shared_address(shared_.k[stage][i / 4])) + i % 4 * kNextKMajor,
          k_major(shared_address(shared_.q[i / 4])) + i % 4 * kNextKMajor, i > 0);
    }
    wgmma_commit();
    wgmma_wait<0>();
  }

  /// Adds to d_weights; returns whether all products are finite.
  __device__ bool add_to_d_weights(int block, const float (&a)[kHeads / 2]) {
    float zero = 0;
#pragma unroll
    for (int i = 0; i < kHeads / 2; ++i) zero = fmaf(a[i], 0.0f, zero);
    const bool is_finite = zero == 0;
    const auto add = [&](auto relu) {
#pragma unroll
      for (int i = 0; i < kHeads / 2; ++i) {
        float& sum = d_weights_[i / 4][i % 2];
        sum = fmaf(d_scores_[i / 2 % 2], relu(i / 2 % 2, a[i]), sum);
      }
    };
    if (is_finite) {
      add([](int, float x) { return fmaxf(x, 0.0f); });
    } else {  // where there is no key the product may be 0 * inf
      const bool has_key[2] = {key_of(block, row_of(0)) >= 0, key_of(block, row_of(1)) >= 0};
      add([&](int half, float x) { return !has_key[half] || x < 0 ? 0 : x; });
    }
    return is_finite;
  }

  /// Where a product is positive its weight goes to `weights`, fragments of [keys, heads], and its
  /// d_score to shared memory.
  __device__ void take_positive(const float (&a)[kHeads / 2],
                                std::uint32_t (&weights)[kHeads / 16][4]) {
    const std::uint32_t d_score_pairs[2] = {pair_of(d_scores_[0] * scale_.d_score),
                                            pair_of(d_scores_[1] * scale_.d_score)};
    const std::uint32_t to = shared_address(shared_.d_scores) +
                             tile_offset(lane() / 16 * 8 + lane() % 8, warp() * 2 + lane() / 8 % 2);
#pragma unroll
    for (int i = 0; i < kHeads / 16; ++i) {
      std::uint32_t d_scores[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int n = i * 2 + j / 2;
        const int half = j % 2;
        const float* const pair = &a[n * 4 + half * 2];
        const std::uint32_t positive = (pair[0] > 0 ? 0xffffu : 0) | (pair[1] > 0 ? ~0xffffu : 0);
        weights[i][j] = weights_[n] & positive;
        d_scores[j] = d_score_pairs[half] & positive;
      }
      store_transposed(to + i * 16 * kTileRowBytes, d_scores);
    }
  }

  __device__ static std::uint32_t pair_of(float x) { return pack<T>(x, x); }

  /// d_q^T += k^T d_scores [columns, heads].
  __device__ void multiply_query(int stage) {
    const std::uint64_t d_scores = k_major(shared_address(shared_.d_scores));
    wgmma_fence();
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const std::uint64_t k = mn_major(shared_address(shared_.k[stage][tile]), kTileBytes);
#pragma unroll
      for (int i = 0; i < kBlock / 16; ++i) {
        multiply_by_heads<T, 1>(d_q_[tile], k + i * kNextMnMajor, d_scores + i * kNextKMajor, 1);
      }
    }
    wgmma_commit();
    wgmma_wait<0>();
  }

  /// d_k = weights q [keys, 64 columns].
  __device__ void multiply_keys(int tile, const std::uint32_t (&weights)[kHeads / 16][4],
                                float (&d_k)[32]) {
    const std::uint64_t q = mn_major(shared_address(shared_.q[tile]), sizeof(shared_.q[tile]));
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kHeads / 16; ++i) {
      multiply_64x64x16_mn_major<T>(d_k, weights[i], q + i * kNextMnMajor, i > 0);
    }
    wgmma_commit();
    wgmma_wait<0>();
  }

  // ---- Outputs.

  /// Puts d_score times 64 columns of d_k into shared memory.
  __device__ void put_keys(int tile, const float (&d_k)[32]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float factor = d_scores_[half] * scale_.weight;
      float* const row = shared_.d_k[row_of(half)] + tile * kTileColumns;
#pragma unroll
      for (int i = 0; i < kTileColumns / 8; ++i) {
        const float* const pair = &d_k[i * 4 + half * 2];
        *reinterpret_cast<float2*>(row + column_of(i, 0)) =
            make_float2(scaled(pair[0], factor), scaled(pair[1], factor));
      }
    }
  }

  /// Hands d_k to the async proxy, a row of a key at a time. A warp emits its own keys.
  __device__ void emit_keys(int block, std::int32_t key) {
    fence_proxy_async();
    __syncwarp();
    if (lane() < 16 && key >= 0) {
      const int row = warp() * 16 + lane();
      const int bytes = params_.dim * static_cast<int>(sizeof(float));
      if constexpr (kMode == KeyGradient::added) {
        add_bulk(params_.d_k + key * params_.d_k_stride, shared_.d_k[row], bytes);
      } else {
        const std::int64_t slot = t_ * params_.slots.slots + std::int64_t{block} * kBlock + row;
        store_bulk(params_.d_k + slot * params_.d_k_stride, shared_.d_k[row], bytes);
      }
    }
    commit_bulk();
  }

  /// Sums d_weights over the lanes and warps that share a head. Outputs take the place of the
  /// stages, which no thread reads any more.
  __device__ void store_d_weights() {
#pragma unroll
    for (int n = 0; n < kHeadBlocks; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& sum = d_weights_[n][e];
#pragma unroll
        for (int step = 4; step < 32; step *= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
        if (lane() < 4) shared_.outputs.d_weights[warp()][column_of(n, e)] = sum;
      }
    }
    __syncthreads();
    const int h = static_cast<int>(threadIdx.x);
    if (h >= params_.heads) return;
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kThreads / 32; ++i) sum += shared_.outputs.d_weights[i][h];
    params_.d_weights[t_ * params_.d_weights_stride + h] = sum;
  }

  __device__ void store_d_q() {
    const float factor = 1 / scale_.d_score;
    T(&d_q)[kHeads][kColumns + 8] = shared_.outputs.d_q;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < kHeads / 16; ++i) {
        std::uint32_t words[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int n = i * 2 + j / 2;
          const float* const pair = &d_q_[tile][n * 4 + j % 2 * 2];
          words[j] = pack<T>(scaled(pair[0], weight(column_of(n, 0)) * factor),
                             scaled(pair[1], weight(column_of(n, 1)) * factor));
        }
        const int h = i * 16 + lane() / 16 * 8 + lane() % 8;
        const int column = tile * kTileColumns + warp() * 16 + lane() / 8 % 2 * 8;
        store_transposed(shared_address(&d_q[h][column]), words);
      }
    }
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < kHeads * kColumns / 8; i += kThreads) {
      const int h = i / (kColumns / 8);
      const int column = i % (kColumns / 8) * 8;
      if (h >= params_.heads || column >= params_.dim) continue;
      T* const to =
          params_.d_q + t_ * params_.d_q_token_stride + h * params_.d_q_head_stride + column;
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(&d_q[h][column]);
    }
  }

  const Parameters<T>& params_;
  const std::int64_t t_;
  const RowSlots slots_;
  const float* const d_scores_of_row_;
  const float* const weights_of_row_;
  Storage& shared_;
  RowScale scale_;
  std::int32_t next_keys_[kGathered];   // of the next block to be gathered; negative: none
  float next_d_scores_[2];              // of this lane's keys in the next block
  float d_scores_[2];                   // in this block; 0 without a key
  std::int32_t next_emitted_key_;       // whose d_k this lane hands over
  std::uint32_t weights_[kHeadBlocks];  // of this lane's heads, two in a word
  float d_weights_[kHeadBlocks][2] = {};
  float d_q_[kTiles][kHeads / 2] = {};  // [columns, heads]
};

}  // namespace winnow::cuda::gradient_sm90
