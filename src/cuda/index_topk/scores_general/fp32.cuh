// SPDX-License-Identifier: Apache-2.0
// General scores of f32 rows, in fp32 arithmetic: one query row after another against a tile of
// keys, of which 128 channels at a time stand in shared memory. A thread has one key and eight
// heads. Rows of the same group reuse the tile where they have at most 128 channels.
#pragma once

#include <cstdint>

#include "cuda/index_topk/parameters.cuh"
#include "cuda/index_topk/scores_general/tiles.cuh"

namespace winnow::cuda::index_topk::general {

class Fp32Scores {
  static constexpr int kChannels = 128;  // of a row in shared memory
  static constexpr int kHeads = 16;      // at a time
  static constexpr int kThreadHeads = kHeads * kTileKeys / kThreads;

 public:
  static constexpr int kBlocksPerSm = 2;

  struct SharedStorage {
    // Padded by four banks, so that neighbouring keys do not conflict.
    alignas(16) float keys[kTileKeys][kChannels + 4];
    alignas(16) float query[kHeads][kChannels + 4];
    float weights[kHeads];
  };

  __device__ Fp32Scores(const ScoreInputs& inputs, SharedStorage& shared)
      : inputs_(inputs), shared_(shared) {}

  /// Calls store(row, tile, i, score, false) for every row and every key i of each tile, with
  /// anything as the score where there is no key.
  template <class Keys, class Store>
  __device__ void run(const Rows& rows, const Tiles& tiles, const Keys& keys, const Store& store) {
    for (int tile = tiles.first; tile < tiles.end; ++tile) {
      loaded_ = -1;
      for (int r = 0; r < rows.count; ++r) {
        const float score = score_of_row(rows.first + r, std::int64_t{tile} * kTileKeys, keys);
        if (threadIdx.x < kTileKeys) store(r, tile, static_cast<int>(threadIdx.x), score, false);
      }
    }
  }

 private:
  __device__ static int first_head() {
    return static_cast<int>(threadIdx.x) / kTileKeys * kThreadHeads;
  }

  /// The score of key threadIdx.x, in the first kTileKeys threads.
  template <class Keys>
  __device__ float score_of_row(std::int64_t t, std::int64_t first, const Keys& keys) {
    float sum = 0;
    for (int head = 0; head < inputs_.heads; head += kHeads) {
      float products[kThreadHeads] = {};
      for (int channel = 0; channel < inputs_.dim; channel += kChannels) {
        load(t, head, channel, first, keys);
        multiply(products, min(kChannels, inputs_.dim - channel));
      }
      // Heads that are not there are left out, because their zeros times an infinite key are NaN.
#pragma unroll
      for (int h = 0; h < kThreadHeads; ++h) {
        if (head + first_head() + h >= inputs_.heads) break;
        sum = fmaf(shared_.weights[first_head() + h], positive_part(products[h]), sum);
      }
    }
    __syncthreads();  // all threads are done with the query's rows
    float* const halves = &shared_.query[0][0];
    if (threadIdx.x >= kTileKeys) halves[threadIdx.x - kTileKeys] = sum;
    __syncthreads();  // the other heads' sums are there
    return sum + halves[threadIdx.x % kTileKeys];
  }

  template <class Keys>
  __device__ void load(std::int64_t t, int head, int channel, std::int64_t first,
                       const Keys& keys) {
    const int width = min(kChannels, inputs_.dim - channel);
    __syncthreads();  // all threads are done with the rows before
    if (channel != loaded_) {
      const float* const k = static_cast<const float*>(inputs_.k);
      for (int i = threadIdx.x; i < kTileKeys * width; i += kThreads) {
        const std::int64_t key = keys.key(first + i / width);
        shared_.keys[i / width][i % width] =
            key < 0 ? 0.0f : k[key * inputs_.k_stride + channel + i % width];
      }
      loaded_ = channel;
    }
    const float* const q = static_cast<const float*>(inputs_.q) + t * inputs_.q_token_stride;
    for (int i = threadIdx.x; i < kHeads * width; i += kThreads) {
      const int h = head + i / width;
      shared_.query[i / width][i % width] =
          h < inputs_.heads ? q[h * inputs_.q_head_stride + channel + i % width] : 0.0f;
    }
    if (threadIdx.x < kHeads) {
      const int h = head + static_cast<int>(threadIdx.x);
      shared_.weights[threadIdx.x] =
          h < inputs_.heads ? inputs_.weights[t * inputs_.weights_stride + h] : 0.0f;
    }
    __syncthreads();  // the rows are there
  }

  __device__ void multiply(float (&products)[kThreadHeads], int width) {
    const float* const key = shared_.keys[threadIdx.x % kTileKeys];
    for (int d = 0; d < width; d += 4) {
      const float4 x = *reinterpret_cast<const float4*>(key + d);
#pragma unroll
      for (int h = 0; h < kThreadHeads; ++h) {
        const float4 y = *reinterpret_cast<const float4*>(&shared_.query[first_head() + h][d]);
        float& sum = products[h];
        sum = fmaf(x.x, y.x, sum);
        sum = fmaf(x.y, y.y, sum);
        sum = fmaf(x.z, y.z, sum);
        sum = fmaf(x.w, y.w, sum);
      }
    }
  }

  const ScoreInputs& inputs_;
  SharedStorage& shared_;
  int loaded_ = -1;  // the first channel of the keys in shared memory
};

}  // namespace winnow::cuda::index_topk::general
