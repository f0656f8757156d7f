// SPDX-License-Identifier: Apache-2.0
// The consumer warpgroup: the gradients that one query row of the indexer gives.
#pragma once

#include <cstdint>

#include "cuda/hopper/pipeline.cuh"
#include "cuda/hopper/store_matrices.cuh"
#include "cuda/index_topk/gradient_sm90/shared.cuh"
#include "cuda/index_topk/gradient_sm90/terms.cuh"
#include "cuda/index_topk/row_scale.cuh"

namespace winnow::cuda::gradient_sm90 {

/// d (64 x heads) += A * B^T with as many heads as d has room for; B is K-major.
template <class T, int kAMnMajor, int kAccumulators>
__device__ inline void multiply_by_heads(float (&d)[kAccumulators], std::uint64_t a,
                                         std::uint64_t b, int accumulate) {
  if constexpr (kAccumulators == 16) {
    multiply_64x32x16<T, kAMnMajor, 0>(d, a, b, accumulate);
  } else {
    multiply_64x64x16<T, kAMnMajor, 0>(d, a, b, accumulate);
  }
}

template <class T, int kHeads, KeyGradient kMode>
class Row {
 public:
  using Storage = SharedStorage<T, kHeads>;

  __device__ Row(const Parameters<T>& params, std::int64_t t, const RowScale& scale,
                 Storage& shared)
      : params_(params),
        t_(t),
        weights_of_row_(params.weights + t * params.weights_stride),
        scale_(scale),
        shared_(shared) {}

  /// Adds `blocks` blocks of keys.
  __device__ void run(int blocks) {
    share_weights();
    PipelineState<kStages> pipeline;
#pragma unroll 1
    for (int block = 0; block < blocks; ++block) {
      add_block(block, pipeline);
      pipeline.next();
    }
    sync_consumers();  // outputs take the place of the stages, which no warp reads any more
    store_d_weights();
    store_d_q();
  }

 private:
  static constexpr unsigned kAllLanes = 0xffffffffu;
  static constexpr int kHeadBlocks = kHeads / 8;

  __device__ float weight(int h) const { return h < params_.heads ? weights_of_row_[h] : 0; }

  /// Puts the weights, two heads in a word, into shared memory for all.
  __device__ void share_weights() {
    const int thread = static_cast<int>(threadIdx.x);
    const float factor = 1 / scale_.weight;
    if (thread < kHeads / 2) {
      shared_.weights[thread] =
          pack<T>(weight(thread * 2) * factor, weight(thread * 2 + 1) * factor);
    }
    sync_consumers();
  }

  // ---- A block of keys.

  __device__ void add_block(int block, const PipelineState<kStages>& pipeline) {
    const int stage = pipeline.stage;
    shared_.slots_full[stage].wait(pipeline.phase);
    const std::int32_t target = target_of(block, stage);
#pragma unroll
    for (int half = 0; half < 2; ++half) d_scores_[half] = shared_.d_scores[stage][row_of(half)];
    shared_.full[stage].wait(pipeline.phase);
    fence_proxy_async();
    float a[kHeads / 2];
    multiply_heads(stage, a);
    const bool is_finite = add_to_d_weights(stage, a);
    Scores<kHeads>& scores = shared_.scores[block % 2];
    std::uint32_t weights[kHeads / 16][4];
    take_positive(a, scores, weights);
    if (!is_finite) scores.infinite_block = block;
    fence_proxy_async();
    sync_consumers();  // the scores are there for all, and none reads those of the previous block
    const bool all_finite = scores.infinite_block != block;
    Positive<kHeads> positive{};
    float d_k[32];
    const auto add_terms = [&](int tile) {
      add_key_terms(shared_, tile, positive, params_.heads, weights_of_row_, 1 / scale_.weight,
                    d_k);
    };
    if (all_finite) {
      start_query(stage, scores);
      multiply_keys(0, weights, d_k);
    } else {
      positive = positive_of<kHeads>(a);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (lane() % 4 == 0) scores.positive[row_of(half)] = positive.of_key[half];
      }
      sync_consumers();
      add_query_terms(shared_, stage, scores, d_q_);
      add_terms(0);
    }
    shared_.free[stage].arrive();
    emit_keys(0, target, d_k);
#pragma unroll 1
    for (int tile = 1; tile < kTiles; ++tile) {
      if (all_finite) {
        multiply_keys(tile, weights, d_k);
      } else {
        add_terms(tile);
      }
      emit_keys(tile, target, d_k);
    }
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
  __device__ bool add_to_d_weights(int stage, const float (&a)[kHeads / 2]) {
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
      const bool has_key[2] = {shared_.keys[stage][row_of(0)] >= 0,
                               shared_.keys[stage][row_of(1)] >= 0};
      add([&](int half, float x) { return !has_key[half] || x < 0 ? 0 : x; });
    }
    return is_finite;
  }

  /// Where a product is positive its weight goes to `weights`, fragments of [keys, heads], and its
  /// d_score to shared memory.
  __device__ void take_positive(const float (&a)[kHeads / 2], Scores<kHeads>& scores,
                                std::uint32_t (&weights)[kHeads / 16][4]) {
    const std::uint32_t d_score_pairs[2] = {pair_of(d_scores_[0] * scale_.d_score),
                                            pair_of(d_scores_[1] * scale_.d_score)};
    const std::uint32_t to = shared_address(scores.d_scores) +
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
        weights[i][j] = shared_.weights[column_of(n, 0) / 2] & positive;
        d_scores[j] = d_score_pairs[half] & positive;
      }
      store_transposed(to + i * 16 * kTileRowBytes, d_scores);
    }
  }

  __device__ static std::uint32_t pair_of(float x) { return pack<T>(x, x); }

  /// Starts d_q^T += k^T d_scores [columns, heads].
  __device__ void start_query(int stage, const Scores<kHeads>& scores) {
    const std::uint64_t d_scores = k_major(shared_address(scores.d_scores));
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
  }

  /// d_k = weights q [keys, 64 columns]. Waits for all products that were started.
  __device__ void multiply_keys(int tile, const std::uint32_t (&weights)[kHeads / 16][4],
                                float (&d_k)[32]) {
    const std::uint64_t q = mn_major(shared_address(shared_.q[tile]), sizeof(shared_.q[tile]));
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kHeads / 16; ++i) {
      multiply_64x64x16<T, 1>(d_k, weights[i], q + i * kNextMnMajor, i > 0);
    }
    wgmma_commit();
    wgmma_wait<0>();
  }

  // ---- Outputs.

  /// The row of d_k, or of terms, to which key lane % 16 of this warp gives; -1 without a key.
  __device__ std::int32_t target_of(int block, int stage) const {
    const int row = warp() * 16 + lane() % 16;
    const std::int32_t key = shared_.keys[stage][row];
    if (kMode == KeyGradient::added || key < 0) return key;
    // A plan of terms has fewer than 2^31.
    return static_cast<std::int32_t>(t_ * params_.slots.slots) + block * kBlock + row;
  }

  /// Emits d_score times 64 columns of d_k. Through shared memory, where every warp has its own
  /// keys, half a warp gets the columns of a key: L2 adds full lines of 128 bytes fastest.
  __device__ void emit_keys(int tile, std::int32_t target, const float (&d_k)[32]) {
    const float factors[2] = {d_scores_[0] * scale_.weight, d_scores_[1] * scale_.weight};
    const auto put = [&](auto product) {
#pragma unroll
      for (int i = 0; i < 32; i += 2) {
        const int half = i / 2 % 2;
        *reinterpret_cast<float2*>(&shared_.d_k[row_of(half)][column_of(i / 4, 0)]) =
            make_float2(product(d_k[i], factors[half]), product(d_k[i + 1], factors[half]));
      }
    };
    if (fabsf(factors[0]) < INFINITY && fabsf(factors[1]) < INFINITY) {
      put([](float sum, float factor) { return sum * factor; });
    } else {
      put([](float sum, float factor) { return scaled(sum, factor); });
    }
    __syncwarp();
    const int column = lane() % 16 * 4;
    const bool has_column = tile * kTileColumns + column < params_.dim;
    float* const to = params_.d_k + tile * kTileColumns + column;
#pragma unroll
    for (int first = 0; first < 16; first += 8) {
      float4 fours[4];  // loaded ahead, since each addition waits for its operands
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = warp() * 16 + first + i * 2 + lane() / 16;
        fours[i] = *reinterpret_cast<const float4*>(&shared_.d_k[row][column]);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const std::int32_t row = __shfl_sync(kAllLanes, target, first + i * 2 + lane() / 16);
        if (row >= 0 && has_column) emit_four(to + row * params_.d_k_stride, fours[i]);
      }
    }
    __syncwarp();  // the next columns take the same place
  }

  __device__ static void emit_four(float* to, float4 x) {
    if constexpr (kMode == KeyGradient::added) {
      asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x.x), "f"(x.y),
                   "f"(x.z), "f"(x.w)
                   : "memory");
    } else {
      *reinterpret_cast<float4*>(to) = x;
    }
  }

  /// Sums d_weights over the lanes and warps that share a head.
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
    sync_consumers();
    const int h = static_cast<int>(threadIdx.x);
    if (h >= params_.heads) return;
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kConsumers / 32; ++i) sum += shared_.outputs.d_weights[i][h];
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
    sync_consumers();
    for (int i = static_cast<int>(threadIdx.x); i < kHeads * kColumns / 8; i += kConsumers) {
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
  const float* const weights_of_row_;
  const RowScale scale_;
  Storage& shared_;
  float d_scores_[2];  // of this lane's keys in the block
  float d_weights_[kHeadBlocks][2] = {};
  float d_q_[kTiles][kHeads / 2] = {};  // [columns, heads]
};

}  // namespace winnow::cuda::gradient_sm90
