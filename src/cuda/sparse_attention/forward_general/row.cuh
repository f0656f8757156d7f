// SPDX-License-Identifier: Apache-2.0
// The general forward kernel's work for one query row and one group of heads: scores, softmax,
// values. The map is at the head of forward_general.cu.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/common/mma.cuh"
#include "cuda/common/softmax.cuh"
#include "cuda/sparse_attention/forward_general/gather.cuh"

namespace winnow::cuda::sparse_attention::forward_general {

template <int kHeads>
inline constexpr int kWarps = kHeads == 16 ? 4 : 8;

/// kPairs: blocks of 16 columns of the values that a warp has.
template <class T, int kHeads, int kPairs>
class RowAttention {
 public:
  using Storage = SharedStorage<T, kHeads>;

  __device__ RowAttention(const ForwardParameters& parameters, unsigned char* memory)
      : parameters_(parameters),
        shared_(*reinterpret_cast<Storage*>(memory)),
        dim_(padded_dim(parameters.qk_dim)),
        stride_(row_elements(parameters.qk_dim)),
        q_tile_(reinterpret_cast<T*>(memory + sizeof(Storage))),
        kv_tiles_(q_tile_ + kHeads * stride_),
        power_(parameters.power),
        rest_log2_(parameters.rest_log2) {
    // The products read channels up to a multiple of 16: those past qk_dim are zero, in all rows
    // and for good.
    if (dim_ > parameters.qk_dim) {
      const int rows = kHeads + parameters.stages * parameters.tile_keys;
      for (int row = thread(); row < rows; row += kThreads) {
        *reinterpret_cast<uint4*>(q_tile_ + row * stride_ + parameters.qk_dim) = uint4{};
      }
    }
  }

  /// Ends with a barrier.
  __device__ void run(std::int64_t t, int first_head) {
    int slots = parameters_.topk;
    if (parameters_.lengths != nullptr) slots = max(0, min(slots, parameters_.lengths[t]));
    const int tile_keys = parameters_.tile_keys;
    const int tiles = slots / tile_keys + (slots % tile_keys != 0 ? 1 : 0);

    load_queries(t, first_head);
    Gather<T, kThreads> gather(parameters_, parameters_.indices + t * parameters_.indices_stride,
                               slots);
    if (tiles > 0) gather.start(0, kv_tiles_, shared_.key[0]);
    clear();

    for (int tile = 0; tile < tiles; ++tile) {
      const int stage = parameters_.stages == 1 ? 0 : tile % 2;
      T* const kv_tile = kv_tiles_ + stage * tile_keys * stride_;
      const int blocks = (min(slots - tile * tile_keys, tile_keys) + kBlockKeys - 1) / kBlockKeys;

      // Q and this tile's rows are there for all; all are done with the previous tile, so its stage
      // is free for the next one.
      wait_for_copies<0>();
      __syncthreads();
      if (parameters_.stages == 2 && tile + 1 < tiles) {
        gather.start(tile + 1, kv_tiles_ + (stage ^ 1) * tile_keys * stride_,
                     shared_.key[stage ^ 1]);
      }
      Scores scores = {};
      if (key_block() < blocks) compute_scores(scores, kv_tile, shared_.key[stage]);
      // The tile's maxima are there; the factors and P of the previous tile have been used.
      __syncthreads();
      compute_softmax(scores, blocks);
      // P and the factors are there; the maxima have been used.
      __syncthreads();
      rescale_values();
      add_values(kv_tile, blocks);
      if (parameters_.stages == 1 && tile + 1 < tiles) {
        __syncthreads();  // all are done with this tile's rows
        gather.start(tile + 1, kv_tiles_, shared_.key[0]);
      }
    }
    finish_rows(t, first_head);
    store_out(t, first_head);
    __syncthreads();  // the next item's Q and factors overwrite this one's
  }

 private:
  static constexpr int kThreads = kWarps<kHeads> * 32;
  static constexpr int kHeadBlocks = kHeads / 16;
  static constexpr int kScoreBlocks = kHeadBlocks / (kWarps<kHeads> / kKeyBlocks);  // of one warp
  static constexpr unsigned kAllLanes = 0xffffffffu;
  using Scores = float[kScoreBlocks][2][4];  // of 16 keys

  __device__ static int thread() { return static_cast<int>(threadIdx.x); }
  __device__ static int warp() { return thread() / 32; }
  __device__ static int lane() { return thread() % 32; }
  __device__ static int key_block() { return warp() % kKeyBlocks; }
  /// The first head that this warp scores.
  __device__ static int score_head() { return warp() / kKeyBlocks * kScoreBlocks * 16; }
  /// Row r (0: lane / 4, 1: lane / 4 + 8) of block i of this warp's scores.
  __device__ static int score_row(int i, int r) {
    return score_head() + i * 16 + r * 8 + lane() / 4;
  }

  __device__ void load_queries(std::int64_t t, int first_head) {
    const T* const q = static_cast<const T*>(parameters_.q) + t * parameters_.q_token_stride;
    for (int row = thread() / kLanesPerRow; row < kHeads; row += kThreads / kLanesPerRow) {
      const int h = first_head + row;
      copy_row(q_tile_ + row * stride_,
               h < parameters_.heads ? q + h * parameters_.q_head_stride : nullptr,
               parameters_.qk_dim, parameters_.q_aligned, thread() % kLanesPerRow);
    }
    commit_copies();
  }

  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < kScoreBlocks; ++i) {
      running_[i][0] = running_[i][1] = -INFINITY;
      sums_[i][0] = sums_[i][1] = 0;
    }
#pragma unroll
    for (int m = 0; m < kHeadBlocks; ++m) {
#pragma unroll
      for (int n = 0; n < kPairs * 2; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) values_[m][n][e] = 0;
      }
    }
  }

  /// S = Q K^T of this warp's 16 keys and its heads, times the power of two in the scale; -inf
  /// where a slot has no key. The largest of each row goes to shared memory.
  __device__ void compute_scores(Scores& scores, const T* kv_tile, const std::int32_t* keys) {
    const BlockOffset by_rows = rows_first(lane());
    const BlockOffset by_columns = columns_first(lane());
    const T* const q_row = q_tile_ + (score_head() + by_rows.row) * stride_ + by_rows.column;
    const T* const k_row =
        kv_tile + (key_block() * kBlockKeys + by_columns.row) * stride_ + by_columns.column;
#pragma unroll 4
    for (int d = 0; d < dim_; d += 16) {
      std::uint32_t k[4];
      load_fragments(k, k_row + d);
#pragma unroll
      for (int i = 0; i < kScoreBlocks; ++i) {
        std::uint32_t a[4];
        load_fragments(a, q_row + i * 16 * stride_ + d);
        multiply_add<T>(scores[i][0], a, k[0], k[1]);
        multiply_add<T>(scores[i][1], a, k[2], k[3]);
      }
    }
    const int first_slot = key_block() * kBlockKeys + lane() % 4 * 2;
    float largest[kScoreBlocks][2];
#pragma unroll
    for (int i = 0; i < kScoreBlocks; ++i) largest[i][0] = largest[i][1] = -INFINITY;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const bool is_key = keys[first_slot + n * 8 + e % 2] >= 0;
#pragma unroll
        for (int i = 0; i < kScoreBlocks; ++i) {
          float& s = scores[i][n][e];
          s = is_key ? s * power_ : -INFINITY;
          largest[i][e / 2] = fmaxf(largest[i][e / 2], s);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kScoreBlocks; ++i) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float& m = largest[i][r];
        m = fmaxf(m, __shfl_xor_sync(kAllLanes, m, 1));
        m = fmaxf(m, __shfl_xor_sync(kAllLanes, m, 2));
        if (lane() % 4 == 0) shared_.partial[key_block()][score_row(i, r)] = m;
      }
    }
  }

  /// Moves the running maxima and sums on, and writes P, rounded to the type of the inputs, and the
  /// factors by which earlier values are rescaled.
  __device__ void compute_softmax(const Scores& scores, int blocks) {
#pragma unroll
    for (int i = 0; i < kScoreBlocks; ++i) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = score_row(i, r);
        float largest = running_[i][r];
#pragma unroll
        for (int block = 0; block < kKeyBlocks; ++block) {
          if (block < blocks) largest = fmaxf(largest, shared_.partial[block][row]);
        }
        const float base = softmax_base(largest);
        const float factor = fast_exp2((running_[i][r] - base) * rest_log2_);
        running_[i][r] = largest;
        sums_[i][r] *= factor;
        if (key_block() == 0 && lane() % 4 == 0) shared_.factor[row] = factor;
        if (key_block() < blocks) {
#pragma unroll
          for (int n = 0; n < 2; ++n) {
            const float p0 = fast_exp2((scores[i][n][r * 2] - base) * rest_log2_);
            const float p1 = fast_exp2((scores[i][n][r * 2 + 1] - base) * rest_log2_);
            sums_[i][r] += p0 + p1;
            const int slot = key_block() * kBlockKeys + n * 8 + lane() % 4 * 2;
            *reinterpret_cast<std::uint32_t*>(&shared_.p[row][slot]) = pack<T>(p0, p1);
          }
        }
      }
    }
  }

  __device__ void rescale_values() {
    bool has_grown = false;
    float factors[kHeadBlocks][2];
#pragma unroll
    for (int m = 0; m < kHeadBlocks; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        factors[m][r] = shared_.factor[m * 16 + r * 8 + lane() / 4];
        has_grown |= factors[m][r] != 1;
      }
    }
    if (__any_sync(kAllLanes, has_grown)) {
#pragma unroll
      for (int m = 0; m < kHeadBlocks; ++m) {
#pragma unroll
        for (int n = 0; n < kPairs * 2; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e) values_[m][n][e] *= factors[m][e / 2];
        }
      }
    }
  }

  /// The first column of block i of this warp's columns.
  __device__ static int value_column(int i) { return (warp() + i * kWarps<kHeads>)*16; }

  /// values += P V.
  __device__ void add_values(const T* kv_tile, int blocks) {
    const BlockOffset by_rows = rows_first(lane());
#pragma unroll 1
    for (int block = 0; block < blocks; ++block) {
      std::uint32_t p[kHeadBlocks][4];
#pragma unroll
      for (int m = 0; m < kHeadBlocks; ++m) {
        load_fragments(p[m], &shared_.p[m * 16 + by_rows.row][block * kBlockKeys + by_rows.column]);
      }
      const T* const v_row =
          kv_tile + (block * kBlockKeys + by_rows.row) * stride_ + by_rows.column;
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        const int column = value_column(i);
        if (column < parameters_.v_dim) {
          std::uint32_t v[4];
          load_fragments_transposed(v, v_row + column);
#pragma unroll
          for (int m = 0; m < kHeadBlocks; ++m) {
            multiply_add<T>(values_[m][i * 2], p[m], v[0], v[1]);
            multiply_add<T>(values_[m][i * 2 + 1], p[m], v[2], v[3]);
          }
        }
      }
    }
  }

  /// Adds up the sums of the four lanes and of the four warps that share a row; writes lse and
  /// max_logits, and the normalizers to shared memory. Ends with a barrier.
  __device__ void finish_rows(std::int64_t t, int first_head) {
    // The maxima in `partial` were last read before the last barrier.
#pragma unroll
    for (int i = 0; i < kScoreBlocks; ++i) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float& sum = sums_[i][r];
        sum += __shfl_xor_sync(kAllLanes, sum, 1);
        sum += __shfl_xor_sync(kAllLanes, sum, 2);
        const int row = score_row(i, r);
        if (lane() % 4 == 0) shared_.partial[key_block()][row] = sum;
        if (key_block() == 0 && lane() % 4 == 0) shared_.largest[row] = running_[i][r];
      }
    }
    wait_for_copies<0>();  // of Q, where there was no tile
    __syncthreads();       // the rows' sums and maxima are there
    if (thread() < kHeads) {
      const int h = first_head + thread();
      float sum = 0;
#pragma unroll
      for (int block = 0; block < kKeyBlocks; ++block) sum += shared_.partial[block][thread()];
      const bool has_sink = parameters_.sink != nullptr && h < parameters_.heads;
      const RowEnd row = finish_row(shared_.largest[thread()] * parameters_.rest, sum,
                                    has_sink ? parameters_.sink[h] : -INFINITY);
      shared_.factor[thread()] = row.normalizer;
      if (h < parameters_.heads) {
        parameters_.lse[t * parameters_.lse_stride + h] = row.lse;
        if (parameters_.max_logits != nullptr) {
          parameters_.max_logits[t * parameters_.max_logits_stride + h] = row.max_logit;
        }
      }
    }
    __syncthreads();  // the normalizers are there
  }

  __device__ void store_out(std::int64_t t, int first_head) {
    T* const out = static_cast<T*>(parameters_.out) + t * parameters_.out_token_stride;
#pragma unroll
    for (int m = 0; m < kHeadBlocks; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = m * 16 + r * 8 + lane() / 4;
        const int h = first_head + row;
        if (h >= parameters_.heads) continue;
        const float normalizer = shared_.factor[row];
        T* const out_row = out + h * parameters_.out_head_stride + lane() % 4 * 2;
#pragma unroll
        for (int n = 0; n < kPairs * 2; ++n) {
          const int column = value_column(n / 2) + n % 2 * 8;
          if (column < parameters_.v_dim) {
            store_pair(out_row + column, values_[m][n][r * 2] * normalizer,
                       values_[m][n][r * 2 + 1] * normalizer, parameters_.out_aligned);
          }
        }
      }
    }
  }

  const ForwardParameters& parameters_;
  Storage& shared_;
  int dim_, stride_;
  T* q_tile_;
  T* kv_tiles_;
  float power_, rest_log2_;         // copies, which are not loaded anew after every asm on memory
  float running_[kScoreBlocks][2];  // the largest score so far of rows lane / 4 and lane / 4 + 8
  float sums_[kScoreBlocks][2];     // this lane's part
  float values_[kHeadBlocks][kPairs * 2][4];  // the accumulators of out
};

}  // namespace winnow::cuda::sparse_attention::forward_general
