// SPDX-License-Identifier: Apache-2.0
// General scores of bf16, f16 and e4m3 rows (as f16, which represents all values of e4m3) on tensor
// cores, for any number of heads and channels.
//
// A product has keys as its rows and heads of one query as its columns. A warp has 32 keys of a
// tile in registers and multiplies them with the heads of its rows, 32 at a time, which stand in
// shared memory; relu, weights and the sum over heads happen in its registers.
//
// clang-format off
//   scores:  warps 0-3   32 keys each of a tile, with query rows 0, 2, 4, ...
//            warps 4-7   the same keys, with rows 1, 3, 5, ...
//   replay:  warps 0-3   32 keys each of a tile, with the only row;   warps 4-7   of the next tile
// clang-format on
//
// Heads of 256 columns (8 rows of 32 heads) stay in shared memory while a block walks over the
// tiles; more of them take more passes. While a tile is multiplied, the next one is loaded into
// registers. Rows of more than 128 channels are multiplied in slices, whose keys and heads are
// loaded in turns. 97 KB of shared memory and at most 255 registers a thread: one block an SM. The
// limit is the rate of mma.sync: a tile of 128 keys and 256 columns is 2,048 products of 16x8x16,
// beside 2,800 cycles of shared memory.
#pragma once

#include <cstdint>
#include <type_traits>

#include <cuda_fp8.h>

#include "cuda/common/mma.cuh"
#include "cuda/index_topk/parameters.cuh"
#include "cuda/index_topk/scores_general/tiles.cuh"

namespace winnow::cuda::index_topk::general {

/// kTiles: how many tiles of keys are multiplied at a time, 1 or 2; with 2 there is one query row.
template <class T, int kTiles>
class TensorCoreScores {
  static constexpr int kChannels = 128;  // of a row in shared memory
  static constexpr int kPieceChannels = 8;
  static constexpr int kPieces = kChannels / kPieceChannels;  // of a row, 16 bytes each
  static constexpr int kSteps = kChannels / 16;               // of a product
  static constexpr int kBlockHeads = 32;                      // columns of a warp's accumulator
  static constexpr int kPassHeads = 128;                      // of a row, at a time
  static constexpr int kWarpKeys = 32;
  static constexpr int kKeyWarps = kTileKeys / kWarpKeys;
  static constexpr int kRowGroups = kThreads / 32 / kKeyWarps / kTiles;  // of warps
  static constexpr int kColumns = kPassHeads * kRowGroups;
  static constexpr bool kIsFp8 = std::is_same_v<T, __nv_fp8_e4m3>;

  using Operand = std::conditional_t<kIsFp8, __half, T>;

 public:
  static constexpr int kBlocksPerSm = 1;

  /// Piece p of row i stands at [i][p ^ i % 8], so that the eight rows of a fragment are in
  /// different banks. Channels past the end of a row are zeros.
  struct SharedStorage {
    uint4 keys[kTiles * kTileKeys][kPieces];
    uint4 heads[kColumns][kPieces];
    float weights[kColumns];
  };
  static_assert(sizeof(SharedStorage) <= 99 * 1024, "what every GPU since 8.0 has for a block");

  __device__ TensorCoreScores(const ScoreInputs& inputs, SharedStorage& shared)
      : inputs_(inputs), shared_(shared) {}

  /// Calls store(row, tile, i, score, adds) for every row and every key i of each tile: with its
  /// score, or anything where there is no key; with two tiles at a time also for one behind the
  /// last. Where `adds` is true the score is to be added to what the same thread stored there
  /// before: heads beyond the first kPassHeads.
  template <class Keys, class Store>
  __device__ void run(const Rows& rows, const Tiles& tiles, const Keys& keys, const Store& store) {
    if (tiles.first >= tiles.end) return;
    const bool is_wide = inputs_.dim > kChannels;
    const int most_heads = is_wide ? kBlockHeads : kPassHeads;
    for (int head = 0; head < inputs_.heads; head += most_heads) {
      Pass pass{};
      pass.head = head;
      pass.heads = min(most_heads, inputs_.heads - head);
      pass.columns = (pass.heads + kBlockHeads - 1) / kBlockHeads * kBlockHeads;
      // A multiple of kRowGroups: which thread stores a score is the same in every pass.
      const int pass_rows = is_wide ? kRowGroups : kColumns / pass.columns;
      for (int row = 0; row < rows.count; row += pass_rows) {
        pass.rows = {rows.first + row, min(pass_rows, rows.count - row)};
        run_pass(pass, tiles, keys, [&](int r, int tile, int i, float score) {
          store(row + r, tile, i, score, head > 0);
        });
      }
    }
  }

 private:
  /// Some heads of some rows, which stand in shared memory together.
  struct Pass {
    Rows rows;
    int head, heads;  // the first one, and how many of each row
    int columns;      // of a row in shared memory: `heads` rounded up
  };

  /// kPieceChannels elements of a row.
  using Piece = std::conditional_t<kIsFp8, uint2, uint4>;
  static constexpr int kRowsAtOnce = kThreads / kPieces;
  static constexpr int kKeyLoads = kTiles * kTileKeys / kRowsAtOnce;  // pieces of a thread

  /// Sums over heads, of the keys 16 m + 8 half + lane / 4 of a warp.
  using Sums = float[2][2];         // [m][half]
  using Products = float[2][4][4];  // [m][8 heads][accumulator of mma]

  template <class Keys, class Store>
  __device__ void run_pass(const Pass& pass, const Tiles& tiles, const Keys& keys,
                           const Store& store) {
    const int slices = (inputs_.dim + kChannels - 1) / kChannels;
    Piece pieces[kKeyLoads];
    load_keys(pieces, keys, tiles.first, 0);
    if (slices == 1) {
      __syncthreads();  // all warps are done with the heads of the pass before
      load_heads(pass, 0);
    }
    Products products;
    for (int tile = tiles.first; tile < tiles.end; tile += kTiles) {
      for (int slice = 0; slice < slices; ++slice) {
        const bool is_last = slice + 1 == slices;
        __syncthreads();  // all warps have the keys before in registers, and are done with the
                          // slice
        store_keys(pieces);
        if (slices > 1) load_heads(pass, slice * kChannels);
        __syncthreads();  // the keys and heads of the slice are there
        load_fragments_of_keys();
        const int next = is_last ? tile + kTiles : tile;
        if (next < tiles.end) load_keys(pieces, keys, next, is_last ? 0 : (slice + 1) * kChannels);
        if (is_last) load_scales(keys, tile);
        for (int r = row_group(); r < pass.rows.count; r += kRowGroups) {
          Sums sums{};
          for (int h = 0; h < pass.heads; h += kBlockHeads) {
            const int column = r * pass.columns + h;
            if (slice == 0) clear(products);
            multiply(products, column);
            if (is_last) add_heads(sums, products, column, pass.heads - h);
          }
          if (is_last) store(r, tile + tile_of_warp(), key_of_lane(), sum_of_quad(sums));
        }
      }
    }
  }

  // Which keys and rows the calling warp and lane have.
  __device__ static int lane() { return static_cast<int>(threadIdx.x % 32); }
  __device__ static int warp() { return static_cast<int>(threadIdx.x / 32); }
  __device__ static int row_group() { return kTiles == 1 ? warp() / kKeyWarps : 0; }
  __device__ static int tile_of_warp() { return kTiles == 1 ? 0 : warp() / kKeyWarps; }
  /// The first key of the warp, in its tile.
  __device__ static int first_key() { return warp() % kKeyWarps * kWarpKeys; }
  /// The key in the tile whose sum sum_of_quad returns to the lane.
  __device__ static int key_of_lane() { return first_key() + lane() % 4 * 8 + lane() / 4; }

  // ---- Loads.

  /// `row` is null where there is none: then the piece is zeros, as past the row's end.
  __device__ Piece load_piece(const T* row, int channel, bool aligned) const {
    Piece piece{};
    if (row == nullptr || channel >= inputs_.dim) return piece;
    if (aligned) return *reinterpret_cast<const Piece*>(row + channel);
    T* const elements = reinterpret_cast<T*>(&piece);
#pragma unroll
    for (int i = 0; i < kPieceChannels; ++i) elements[i] = row[channel + i];
    return piece;
  }

  __device__ static uint4 operands(const Piece& piece) {
    if constexpr (kIsFp8) {
      uint4 converted;
      auto* const pairs = reinterpret_cast<__half2_raw*>(&converted);
      const auto* const from = reinterpret_cast<const __nv_fp8x2_storage_t*>(&piece);
#pragma unroll
      for (int i = 0; i < kPieceChannels / 2; ++i)
        pairs[i] = __nv_cvt_fp8x2_to_halfraw2(from[i], __NV_E4M3);
      return converted;
    } else {
      return piece;
    }
  }

  __device__ static int piece_of_thread() { return static_cast<int>(threadIdx.x % kPieces); }
  __device__ static int row_of_thread(int i) {
    return static_cast<int>(threadIdx.x / kPieces) + i * kRowsAtOnce;
  }
  __device__ static void store_piece(uint4 (&rows)[][kPieces], int row, const Piece& piece) {
    rows[row][piece_of_thread() ^ row % 8] = operands(piece);
  }

  /// Only issues the loads of a slice of some tiles' keys.
  template <class Keys>
  __device__ void load_keys(Piece (&pieces)[kKeyLoads], const Keys& keys, int tile, int channel) {
    const T* const k = static_cast<const T*>(inputs_.k);
#pragma unroll
    for (int i = 0; i < kKeyLoads; ++i) {
      const std::int64_t key = keys.key(std::int64_t{tile} * kTileKeys + row_of_thread(i));
      pieces[i] = load_piece(key < 0 ? nullptr : k + key * inputs_.k_stride,
                             channel + piece_of_thread() * kPieceChannels, inputs_.k_aligned);
    }
  }
  __device__ void store_keys(const Piece (&pieces)[kKeyLoads]) {
#pragma unroll
    for (int i = 0; i < kKeyLoads; ++i) store_piece(shared_.keys, row_of_thread(i), pieces[i]);
  }

  /// Loads a slice of the pass's heads, with their weights.
  __device__ void load_heads(const Pass& pass, int channel) {
    const int columns = pass.rows.count * pass.columns;
    const T* const q = static_cast<const T*>(inputs_.q);
#pragma unroll 4
    for (int column = row_of_thread(0); column < columns; column += kRowsAtOnce) {
      const int h = column % pass.columns;
      const std::int64_t t = pass.rows.first + column / pass.columns;
      const T* const row = q + t * inputs_.q_token_stride + (pass.head + h) * inputs_.q_head_stride;
      store_piece(shared_.heads, column,
                  load_piece(h < pass.heads ? row : nullptr,
                             channel + piece_of_thread() * kPieceChannels, inputs_.q_aligned));
    }
    for (int column = threadIdx.x; column < columns; column += kThreads) {
      const int h = column % pass.columns;
      const std::int64_t t = pass.rows.first + column / pass.columns;
      shared_.weights[column] =
          h < pass.heads ? inputs_.weights[t * inputs_.weights_stride + pass.head + h] : 0.0f;
    }
  }

  /// Loads the warp's keys, all channels in shared memory, as operands of products.
  __device__ void load_fragments_of_keys() {
    const BlockOffset at = rows_first(lane());
    const int first = tile_of_warp() * kTileKeys + first_key() + at.row;
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const int piece = 2 * step + at.column / kPieceChannels;
        load_fragments(keys_[m][step], &shared_.keys[first + m * 16][piece ^ lane() % 8]);
      }
    }
  }

  /// Loads the scales of the keys whose sums the lane has.
  template <class Keys>
  __device__ void load_scales(const Keys& keys, int tile) {
    if constexpr (kIsFp8) {
      const std::int64_t first =
          std::int64_t{tile + tile_of_warp()} * kTileKeys + first_key() + lane() / 4;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const std::int64_t key = keys.key(first + i * 8);
        scales_[i / 2][i % 2] = key < 0 ? 1.0f : inputs_.k_scale[key];
      }
    }
  }

  // ---- Products.

  __device__ static void clear(Products& products) {
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) products[m][n][e] = 0;
      }
    }
  }

  /// Multiplies the warp's keys with the 32 heads from `column` on.
  __device__ void multiply(Products& products, int column) const {
    const BlockOffset at = columns_first(lane());
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int piece = (2 * step + at.column / kPieceChannels) ^ lane() % 8;
#pragma unroll
      for (int n = 0; n < 4; n += 2) {
        std::uint32_t heads[4];
        load_fragments(heads, &shared_.heads[column + n * 8 + at.row][piece]);
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          multiply_add<Operand>(products[m][n], keys_[m][step], heads[0], heads[1]);
          multiply_add<Operand>(products[m][n + 1], keys_[m][step], heads[2], heads[3]);
        }
      }
    }
  }

  /// Adds weight * max(product, 0) of the lane's columns. Columns from `heads` on are left out,
  /// because their zeros times an infinite key are NaN.
  __device__ void add_heads(Sums& sums, const Products& products, int column, int heads) const {
    const int first = lane() % 4 * 2;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const float2 pair =
          *reinterpret_cast<const float2*>(&shared_.weights[column + n * 8 + first]);
      const float weights[2] = {pair.x, pair.y};
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        if (n * 8 + first + j >= heads) continue;
#pragma unroll
        for (int m = 0; m < 2; ++m) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            float product = products[m][n][half * 2 + j];
            if constexpr (kIsFp8) product *= scales_[m][half];
            sums[m][half] = fmaf(weights[j], positive_part(product), sums[m][half]);
          }
        }
      }
    }
  }

  /// Sums over the four lanes that hold columns of the same keys. Each lane gets one of their four
  /// keys, key_of_lane().
  __device__ static float sum_of_quad(const Sums& sums) {
    const bool has_second_half = lane() % 2 == 1;
    const bool has_second_m = lane() % 4 >= 2;
    float of_half[2];
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const float kept = has_second_half ? sums[m][1] : sums[m][0];
      const float sent = has_second_half ? sums[m][0] : sums[m][1];
      of_half[m] = kept + __shfl_xor_sync(0xffffffffu, sent, 1);
    }
    const float kept = has_second_m ? of_half[1] : of_half[0];
    const float sent = has_second_m ? of_half[0] : of_half[1];
    return kept + __shfl_xor_sync(0xffffffffu, sent, 2);
  }

  const ScoreInputs& inputs_;
  SharedStorage& shared_;
  std::uint32_t keys_[2][kSteps][4];
  float scales_[2][2];
};

}  // namespace winnow::cuda::index_topk::general
