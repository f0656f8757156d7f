// SPDX-License-Identifier: Apache-2.0
// What the warps of Hopper's forward kernel share: sizes and shared memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/hopper/barrier.cuh"
#include "cuda/hopper/wgmma.cuh"
#include "cuda/sparse_attention/lazy_maximum.cuh"
#include "cuda/sparse_attention/parameters.cuh"

namespace winnow::cuda::sparse_attention::forward_sm90 {

using namespace winnow::hopper;

inline constexpr int kHeads = 64;      // of one item
inline constexpr int kBlock = 64;      // keys
inline constexpr int kSlices = 4;      // of a block: 16 keys each, those of one producer warp
inline constexpr int kHalfTiles = 4;   // 256 channels, the columns of out of one math warpgroup
inline constexpr int kValueTiles = 8;  // 512 channels
inline constexpr int kMaxTiles = 9;
inline constexpr int kEarlyTiles = 5;  // of S, issued before the values of the other block
inline constexpr int kTileBytes = kBlock * kTileRowBytes;  // of keys, of Q and of P
inline constexpr int kParts = 3;  // of a block, which land one after the other
inline constexpr int kWarpgroup = 128;
inline constexpr int kThreads = 3 * kWarpgroup;
inline constexpr int kMathRegisters = 216;
inline constexpr int kProducerRegisters = 72;

/// The tile of a warpgroup's block that is gathered and multiplied i-th: first those of the values
/// that it multiplies itself.
template <int kSide>
__host__ __device__ constexpr int tile_of(int i) {
  return i < kValueTiles ? (kSide * kHalfTiles + i) % kValueTiles : i;
}
/// The first tile, in that order, of a part; past the last part the end.
__host__ __device__ constexpr int first_tile(int part) {
  return part == 0 ? 0 : part == 1 ? kHalfTiles : part == 2 ? kEarlyTiles : kMaxTiles;
}

/// What the producer tells a math warpgroup about its block of a pair.
struct BlockInfo {
  std::uint32_t valid[2];  // bit j of word i: slot 32 i + j of the block holds a key
  std::int32_t item;
  std::uint32_t flags;

  __device__ bool has(std::uint32_t flag) const { return (flags & flag) != 0; }
};
inline constexpr std::uint32_t kFirst = 1;  // the first pair of its item
inline constexpr std::uint32_t kLast = 2;   // the last pair of its item
inline constexpr std::uint32_t kEmpty = 4;  // there is no block, the pair has only one
inline constexpr std::uint32_t kEnd = 8;    // there is no pair: all items are done

// The last tile of a block holds the rope part and, once S is done, P.
struct SharedStorage {
  std::byte q[kMaxTiles * kTileBytes];
  std::byte blocks[2][kMaxTiles * kTileBytes];  // of warpgroup 0 and 1
  float maxima[2][kHeads];                      // the running maximum after a warpgroup's block
  float sums[kHeads], largest[kHeads];          // of warpgroup 1, at the end of an item
  float normalizers[kHeads];                    // by which out is multiplied at the end of an item
  BlockInfo info[2][2];                         // of even and odd pairs
  Barrier info_full[2][2];
  Barrier full[2][kParts];      // a part's rows have landed
  Barrier free[2][2][kSlices];  // out of the own (0) or the other (1) warpgroup has used a slice
  Barrier ready[2];             // P and the maxima of a warpgroup's block are written
  Barrier q_full;
  Barrier finished;  // the normalizers of an item are written
};
static_assert(sizeof(SharedStorage) <= 227 * 1024);

}  // namespace winnow::cuda::sparse_attention::forward_sm90
