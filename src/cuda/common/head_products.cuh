// SPDX-License-Identifier: Apache-2.0
// The products of a query row's heads with its keys, 64 keys at a time, for every type and shape;
// index_target, dense_index_loss and the indexer's gradients begin with them.
//
// A block of 4 warps has one query row and up to 64 of its heads. Keys and heads are loaded in
// steps of 128 bytes of each row through three stages of cp.async, so that rows may have any width;
// keys are gathered, with their indices loaded one tile ahead. A warp has 16 or 32 keys and 16 or
// 32 heads. Limits: the bandwidth of L2 (32 operations a byte), then that of shared memory.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "cuda/common/mma.cuh"
#include "cuda/common/row_slots.cuh"
#include "cuda/common/runtime.h"
#include "cuda/common/tile_product.cuh"

namespace winnow::cuda {

inline constexpr int kTileKeys = 64;
inline constexpr int kHeadStages = 3;
inline constexpr int kHeadThreads = 128;

/// The operands of one pass over some heads of every row.
struct HeadOperands {
  const void* q;  // [tokens, heads, dim], from the first head of the pass on
  const void* k;  // [keys, dim]
  std::int64_t q_token_stride, q_head_stride;
  std::int64_t k_stride;
  std::int64_t tokens;
  std::int32_t heads;  // of the pass
  std::int32_t dim;
  bool q_aligned, k_aligned;  // rows at 16-byte boundaries
  SlotLists slots;
};

/// How warps and lanes share a tile of kTileKeys x kHeads, and the layout of its operands in shared
/// memory.
template <class T, int kHeads>
struct HeadTile {
  static constexpr int kVector = 16 / sizeof(T);        // elements of a 16-byte copy
  static constexpr int kChannels = 128 / sizeof(T);     // of a step
  static constexpr int kStride = kChannels + kVector;   // eight rows begin in distinct banks
  static constexpr int kPieces = kChannels / kVector;   // copies of a row
  static constexpr int kRows = kHeadThreads / kPieces;  // copied at once
  static constexpr int kKeyWarps = kHeads == 16 ? 4 : 2;
  static constexpr int kHeadWarps = kHeadThreads / 32 / kKeyWarps;
  static constexpr int kKeyBlocks = kTileKeys / kKeyWarps / 16;  // of 16 keys, per warp
  static constexpr int kHeadBlocks = kHeads / kHeadWarps / 8;    // of 8 heads, per warp

  struct Stage {
    alignas(16) T keys[kTileKeys][kStride];
    alignas(16) T heads[kHeads][kStride];
    std::int32_t key[kTileKeys];  // the row of each key; -1: none, and its row above is zeros
  };
  using Accumulator = float[kKeyBlocks][kHeadBlocks][4];

  __device__ static int warp() { return static_cast<int>(threadIdx.x) / 32; }
  __device__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }
  __device__ static int key_warp() { return warp() % kKeyWarps; }
  __device__ static int head_warp() { return warp() / kKeyWarps; }
  /// The first key and the first head of the calling warp.
  __device__ static int first_key() { return key_warp() * kKeyBlocks * 16; }
  __device__ static int first_head() { return head_warp() * kHeadBlocks * 8; }
  /// Which key of the tile accumulator [block][..][e] is, and which head [..][block][e].
  __device__ static int key(int block, int e) {
    return first_key() + block * 16 + row_in_block(lane(), e);
  }
  __device__ static int head(int block, int e) {
    return first_head() + block * 8 + column_in_block(lane(), e);
  }
};

/// The tiles of one query row, one after another. Every call of `multiply` and `next` contains
/// barriers of the block; what it returns stays valid until the next call.
template <class T, int kHeads>
class HeadProducts {
 public:
  using Tile = HeadTile<T, kHeads>;
  using Stage = typename Tile::Stage;

  /// After a tile's products the next `column_steps` calls of `next` give its keys and heads once
  /// more, kChannels columns at a time from first_column on.
  __device__ HeadProducts(const HeadOperands& operands, const RowSlots& slots, std::int64_t t,
                          Stage (&stages)[kHeadStages], int first_column = 0, int column_steps = 0)
      : operands_(operands),
        slots_(slots),
        q_(static_cast<const T*>(operands.q) + t * operands.q_token_stride),
        stages_(stages),
        score_steps_((operands.dim + Tile::kChannels - 1) / Tile::kChannels),
        tile_steps_(score_steps_ + column_steps),
        first_column_(first_column),
        tiles_(slots.count / kTileKeys + (slots.count % kTileKeys != 0 ? 1 : 0)) {
    load_keys(0);
    begin_tile(0);
#pragma unroll 1
    for (int i = 0; i < kHeadStages - 1; ++i) start();
  }

  __device__ int tiles() const { return tiles_; }

  /// Multiplies the next tile's keys and heads.
  __device__ const Stage& multiply(typename Tile::Accumulator& products) {
    clear_accumulators(products);
    const Stage* stage = nullptr;
#pragma unroll 1
    for (int step = 0; step < score_steps_; ++step) {
      stage = &next();
      multiply_tile<Tile::kChannels, true, true>(
          products, &stage->keys[Tile::first_key()][0], Tile::kStride,
          &stage->heads[Tile::first_head()][0], Tile::kStride);
    }
    return *stage;
  }

  /// The stage of the next step.
  __device__ const Stage& next() {
    // The step's rows are there for all threads; all are done with the previous step, whose stage
    // the next copies overwrite.
    wait_for_copies<kHeadStages - 2>();
    __syncthreads();
    start();
    const Stage& stage = stages_[read_];
    read_ = read_ + 1 == kHeadStages ? 0 : read_ + 1;
    return stage;
  }

 private:
  static constexpr int kKeyCopies = kTileKeys / Tile::kRows;  // per thread
  static constexpr int kHeadCopies = kHeads / Tile::kRows;

  /// Starts the copies of the next step, if there is one. It always commits a group, so that the
  /// number of pending groups tells which steps have landed.
  __device__ void start() {
    if (tile_ < tiles_) {
      Stage& stage = stages_[write_];
      write_ = write_ + 1 == kHeadStages ? 0 : write_ + 1;
      const int column = step_ < score_steps_
                             ? step_ * Tile::kChannels
                             : first_column_ + (step_ - score_steps_) * Tile::kChannels;
      const T* const k = static_cast<const T*>(operands_.k);
#pragma unroll
      for (int i = 0; i < kKeyCopies; ++i) {
        const int row = row_ + i * Tile::kRows;
        copy(&stage.keys[row][piece_ * Tile::kVector],
             keys_[i] < 0 ? nullptr : k + keys_[i] * operands_.k_stride, column,
             operands_.k_aligned);
        if (piece_ == 0) stage.key[row] = keys_[i];
      }
#pragma unroll
      for (int i = 0; i < kHeadCopies; ++i) {
        const int row = row_ + i * Tile::kRows;
        copy(&stage.heads[row][piece_ * Tile::kVector],
             row < operands_.heads ? q_ + row * operands_.q_head_stride : nullptr, column,
             operands_.q_aligned);
      }
      if (++step_ == tile_steps_) begin_tile(tile_ + 1);
    }
    commit_copies();
  }

  /// Copies this thread's piece of a row; writes zeros for no row (null) and past the row's end.
  __device__ void copy(T* to, const T* row, int column, bool aligned) {
    column += piece_ * Tile::kVector;
    if (row == nullptr || column >= operands_.dim) {
      *reinterpret_cast<uint4*>(to) = uint4{};
    } else if (aligned) {
      copy_16_bytes_async(to, row + column);
    } else {
#pragma unroll
      for (int e = 0; e < Tile::kVector; ++e) to[e] = row[column + e];
    }
  }

  __device__ void begin_tile(int tile) {
    tile_ = tile;
    step_ = 0;
#pragma unroll
    for (int i = 0; i < kKeyCopies; ++i) keys_[i] = next_keys_[i];
    load_keys(tile + 1);
  }

  __device__ void load_keys(int tile) {
#pragma unroll
    for (int i = 0; i < kKeyCopies; ++i) {
      next_keys_[i] = slots_.key(std::int64_t{tile} * kTileKeys + row_ + i * Tile::kRows);
    }
  }

  const HeadOperands& operands_;
  const RowSlots& slots_;
  const T* q_;
  Stage (&stages_)[kHeadStages];
  int score_steps_, tile_steps_;
  int first_column_;
  int tiles_;
  int row_ = static_cast<int>(threadIdx.x) / Tile::kPieces;
  int piece_ = static_cast<int>(threadIdx.x) % Tile::kPieces;
  int tile_ = 0;  // the tile and its step that are started next
  int step_ = 0;
  int write_ = 0;
  int read_ = 0;
  std::int32_t keys_[kKeyCopies];       // of tile_
  std::int32_t next_keys_[kKeyCopies];  // of tile_ + 1
};

/// Calls pass.template operator()<T, kHeads>(operands, first_head) for every kHeads of the `heads`
/// heads.
template <class T, int kHeads, class Pass>
void for_each_pass(HeadOperands operands, std::int64_t heads, const Pass& pass) {
  const T* const q = static_cast<const T*>(operands.q);
  for (std::int64_t first = 0; first < heads; first += kHeads) {
    operands.q = q + first * operands.q_head_stride;
    operands.heads = static_cast<std::int32_t>(std::min<std::int64_t>(kHeads, heads - first));
    pass.template operator()<T, kHeads>(operands, first);
  }
}

/// Does the same with the type of q [tokens, heads, dim] and k [keys, dim], and with up to 64 heads
/// at once. Which kernel a row gets does not depend on the number of rows or keys.
template <class Pass>
void for_each_pass(const Tensor& q, const Tensor& k, const SlotLists& slots, const Pass& pass) {
  const HeadOperands operands{.q = q.data,
                              .k = k.data,
                              .q_token_stride = q.stride[0],
                              .q_head_stride = q.stride[1],
                              .k_stride = k.stride[0],
                              .tokens = q.shape[0],
                              .heads = 0,
                              .dim = static_cast<std::int32_t>(q.shape[2]),
                              .q_aligned = has_aligned_rows(q),
                              .k_aligned = has_aligned_rows(k),
                              .slots = slots};
  const std::int64_t heads = q.shape[1];
  const auto with_heads = [&]<class T>(T) {
    if (heads <= 16) return for_each_pass<T, 16>(operands, heads, pass);
    if (heads <= 32) return for_each_pass<T, 32>(operands, heads, pass);
    return for_each_pass<T, 64>(operands, heads, pass);
  };
  if (q.dtype == DType::bf16) return with_heads(__nv_bfloat16{});
  if (q.dtype == DType::f16) return with_heads(__half{});
  return for_each_pass<float, 32>(operands, heads, pass);
}

}  // namespace winnow::cuda
