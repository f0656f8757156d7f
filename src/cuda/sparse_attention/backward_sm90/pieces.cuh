// SPDX-License-Identifier: Apache-2.0
// Which items a thread block takes. They are dealt out in turns, and all blocks are done at the
// same time unless the last round has few items. Those can be split along their lists (Split), here
// with 6 blocks, of which A is the first, and 2 items in the last round:
//
// clang-format off
//   in_parts   A  whole items                          + 1/3 of item 6, then
//              C  whole items                          + 1/3 of item 6, then
//              E  whole items                          + 1/3 of item 6;  B, D, F likewise item 7
//
//   in_pairs   A  1/3 of item 1  + whole items  + all of item 0
//              B  2/3 of item 2  + whole items  + 2/3 of item 1
//              C  all of item 3  + whole items  + 1/3 of item 2
//              D, E, F  likewise items 4 to 7: the last two rounds are split
// clang-format on
//
// In pairs, blocks change items at different times, which helps where lists are short; in parts,
// they stay at the same keys. A piece hands its sums of dQ on to the next one through device
// memory, so that their bits are those of an item in one piece. A block waits for blocks of lower
// numbers alone, which have started before, and for pieces that these should have done long ago:
// part i of n comes after i/n of the whole items.
#pragma once

#include <climits>
#include <cstdint>

#include "cuda/sparse_attention/backward_sm90/shared.cuh"

namespace winnow::cuda::sparse_attention::backward_sm90 {

/// The share of the calling thread block where items are whole.
template <class T>
__device__ Share share_of_whole_items(const BackwardSm90Parameters<T>& params) {
  const auto grid = static_cast<int>(gridDim.x);
  const auto block = static_cast<int>(blockIdx.x);
  return {.pieces = (params.items - block + grid - 1) / grid,
          .places = {INT_MAX, INT_MAX},
          .split = {}};
}

/// The same with the last round's items in parts, one a block.
template <class T>
__device__ Share share_in_parts(const BackwardSm90Parameters<T>& params) {
  const auto grid = static_cast<int>(gridDim.x);
  const auto block = static_cast<int>(blockIdx.x);
  const int rounds = params.items / grid;
  const int split_items = params.items % grid;
  const int number = rounds * grid + block % split_items;
  const int part = block / split_items;
  Share share = {.pieces = rounds, .places = {INT_MAX, INT_MAX}, .split = {}};
  if (part >= params.split_blocks) return share;
  const int blocks = item_of(params, number).blocks;
  const int begin = blocks * part / params.split_blocks;
  const int end = blocks * (part + 1) / params.split_blocks;
  if (begin == end) return share;
  share.pieces += 1;
  share.places[0] = rounds * part / params.split_blocks;
  share.split[0] = {number, begin, end, block % split_items};
  return share;
}

/// The same with the items of the last two rounds in pairs: `split_blocks` neighbours share as many
/// items and one. A block begins with the head of one and ends with the tail of the one before.
template <class T>
__device__ Share share_in_pairs(const BackwardSm90Parameters<T>& params) {
  const auto grid = static_cast<int>(gridDim.x);
  const auto block = static_cast<int>(blockIdx.x);
  const int rounds = params.items / grid - 1;
  const int team = min(block / params.split_blocks, params.items % grid);
  const int number = rounds * grid + block + team;
  Share share = {.pieces = rounds + 1, .places = {INT_MAX, rounds}, .split = {}};
  share.split[1] = {number, 0, item_of(params, number).blocks, block};
  if (team == params.items % grid) return share;  // the block is in no team
  const int member = block - team * params.split_blocks;
  share.split[1].begin = share.split[1].end * member / params.split_blocks;
  const int head = item_of(params, number + 1).blocks * (member + 1) / params.split_blocks;
  if (head == 0) return share;
  share.pieces += 1;
  share.places[0] = 0;
  share.places[1] += 1;
  share.split[0] = {number + 1, 0, head, block + 1};
  return share;
}

/// Whether the calling thread block has a piece number `i`.
template <KeyGradients kMode, class T>
__device__ bool has_piece(const BackwardSm90Parameters<T>& params, const Share& share, int i) {
  if constexpr (kMode == KeyGradients::added) return i < share.pieces;
  return own_block() + i * static_cast<int>(gridDim.x) < params.items;
}

/// Piece number `i` of a thread block that has it.
template <KeyGradients kMode, class T>
__device__ Piece piece_of(const BackwardSm90Parameters<T>& params, const Share& share, int i) {
  int before = 0;  // pieces of split items
  if constexpr (kMode == KeyGradients::added) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      if (i == share.places[j]) return share.split[j];
      before += i > share.places[j];
    }
  }
  const int number = own_block() + (i - before) * static_cast<int>(gridDim.x);
  return {number, 0, item_of(params, number).blocks, 0};
}

/// What the pieces of a split item hand on, in device memory.
inline constexpr int kCarriedWords = 3;
struct Carried {
  float* sums;       // of dQ: those of warpgroups 1 and 2, then those of the rope part
  float* rope_sums;  // by warpgroup 0
  unsigned* blocks;  // of keys, counted by each of the warps that have added them to the sums
  unsigned* rope_blocks;
  unsigned* has_keys;  // 0: none so far
};

template <int kTiles, class T>
__device__ Carried carried_of(const BackwardSm90Parameters<T>& params, const Piece& piece) {
  constexpr int kSums = kHeads * kTileColumns;  // of a tile
  float* const sums = params.carried_sums + std::int64_t{piece.carried} * (kSums * kTiles);
  unsigned* const words = params.carried_words + piece.carried * kCarriedWords;
  return {sums, sums + kSums * kValueTiles, words, words + 1, words + 2};
}

/// Hands the sums of a piece on. Called by kThreadCount threads, of which each has the same sums
/// for every piece.
template <int kThreadCount, int kValues>
__device__ void hand_on(const float (&values)[kValues], float* sums, unsigned* blocks,
                        const Piece& piece) {
  const unsigned thread = own_thread() % kThreadCount;
#pragma unroll
  for (int i = 0; i < kValues; ++i) __stcg(sums + i * kThreadCount + thread, values[i]);
  __syncwarp();
  if (thread % 32 == 0) {
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(blocks),
                 "r"(piece.end - piece.begin)
                 : "memory");
  }
}

/// Takes the sums of the pieces before over, when these have handed them on.
template <int kThreadCount, int kValues>
__device__ void take_over(float (&values)[kValues], const float* sums, const unsigned* blocks,
                          const Piece& piece) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      ".reg .u32 counted;\n"
      "again:\n"
      "ld.acquire.gpu.global.u32 counted, [%0];\n"
      "setp.eq.u32 done, counted, %1;\n"
      "@done bra end;\n"
      "nanosleep.u32 1000;\n"
      "bra again;\n"
      "end:\n"
      "}\n" ::"l"(blocks),
      "r"(piece.begin * (kThreadCount / 32))
      : "memory");
  const unsigned thread = own_thread() % kThreadCount;
#pragma unroll
  for (int i = 0; i < kValues; ++i) values[i] = __ldcg(sums + i * kThreadCount + thread);
}

}  // namespace winnow::cuda::sparse_attention::backward_sm90
