// SPDX-License-Identifier: Apache-2.0
// Which items a thread block takes. They are dealt out in turns, and all blocks are done at the
// same time unless the last round has few items. Those can be split along their lists: each into
// `parts`, one a block; or, together with those of the round before, in pairs of head and tail.
// Here 6 blocks, of which A is the first, have four rounds and 2 items more; items that are split
// count from 0:
//
// clang-format off
//   in parts   A  1/3 of 0   whole      whole      whole      whole
//              C  whole      1/3 of 0   whole      whole      whole
//              E  whole      whole      1/3 of 0   whole      whole      B, D, F likewise item 1
//
//   in pairs   A  1/3 of 1   whole      whole      whole      all of 0
//              B  2/3 of 2   whole      whole      whole      2/3 of 1
//              C  all of 3   whole      whole      whole      1/3 of 2   D, E, F likewise items 4 to 7
// clang-format on
//
// In pairs, blocks change items at different times, which helps where lists are short; in parts,
// they stay at the same keys. A piece hands its sums of dQ on to the next one through device
// memory, so that their bits are those of an item in one piece. A block waits for blocks of lower
// numbers alone, and for pieces that these should have done long ago. They number themselves as
// they start, so that those have started, however many run at a time.
#pragma once

#include <climits>
#include <cstdint>

#include "cuda/common/own_index.cuh"
#include "cuda/sparse_attention/backward_sm90/shared.cuh"

namespace winnow::cuda::sparse_attention::backward_sm90 {

template <class T>
__device__ bool can_split(const BackwardSm90Parameters<T>& params) {
  return params.exchange.parts > 0 || params.exchange.team_blocks > 0;
}

/// Block number `block` takes a part of one of the last round's items.
template <class T>
__device__ Schedule schedule_in_parts(const BackwardSm90Parameters<T>& params, int block) {
  const int parts = params.exchange.parts;
  const auto grid = static_cast<int>(gridDim.x);
  const int rounds = params.items / grid;
  const int split_items = params.items % grid;
  Schedule schedule = {.block = block, .pieces = rounds, .places = {INT_MAX, INT_MAX}, .split = {}};
  const int part = block / split_items;
  if (part >= parts) return schedule;
  const int number = rounds * grid + block % split_items;
  const int blocks = item_of(params, number).blocks;
  const int begin = blocks * part / parts;
  const int end = blocks * (part + 1) / parts;
  if (begin == end) return schedule;
  schedule.pieces += 1;
  schedule.places[0] = rounds * part / parts;
  schedule.split[0] = {number, begin, end, block % split_items};
  return schedule;
}

/// Of the items of the last two rounds a team of `team_blocks` neighbours has as many and one more.
/// A block begins with the head of one and ends with the tail of the one before.
template <class T>
__device__ Schedule schedule_in_pairs(const BackwardSm90Parameters<T>& params, int block) {
  const int team_blocks = params.exchange.team_blocks;
  const auto grid = static_cast<int>(gridDim.x);
  const int rounds = params.items / grid - 1;
  const int teams = params.items % grid;
  const int team = min(block / team_blocks, teams);
  const int number = rounds * grid + block + team;
  Schedule schedule = {
      .block = block, .pieces = rounds + 1, .places = {INT_MAX, rounds}, .split = {}};
  schedule.split[1] = {number, 0, item_of(params, number).blocks, block};
  if (team == teams) return schedule;  // the block is in none
  const int member = block - team * team_blocks;
  // A list has up to 2^24 blocks, and a team at most 255 members.
  const auto share_of = [&](int blocks, int members) {
    return static_cast<int>(static_cast<unsigned>(blocks) * members / team_blocks);
  };
  schedule.split[1].begin = share_of(schedule.split[1].end, member);
  const int head = share_of(item_of(params, number + 1).blocks, member + 1);
  if (head == 0) return schedule;
  schedule.pieces += 1;
  schedule.places[0] = 0;
  schedule.places[1] += 1;
  // The last member has all of its item, and hands nothing on.
  schedule.split[0] = {number + 1, 0, head, block + 1};
  return schedule;
}

/// What the calling thread block takes. Called by one thread, once where items are split.
template <class T>
__device__ Schedule schedule_of_block(const BackwardSm90Parameters<T>& params, bool is_split) {
  if (!is_split) {
    const auto grid = static_cast<int>(gridDim.x);
    const auto block = static_cast<int>(blockIdx.x);
    return {.block = block,
            .pieces = (params.items - block + grid - 1) / grid,
            .places = {INT_MAX, INT_MAX},
            .split = {}};
  }
  const auto block = static_cast<int>(atomicAdd(params.exchange.started_blocks, 1u));
  return params.exchange.parts > 0 ? schedule_in_parts(params, block)
                                   : schedule_in_pairs(params, block);
}

/// Whether the calling thread block has a piece number `i`.
template <KeyGradients kMode, class T>
__device__ bool has_piece(const BackwardSm90Parameters<T>& params, const Schedule& schedule,
                          int i) {
  if constexpr (kMode == KeyGradients::added) return i < schedule.pieces;
  return own_block() + i * static_cast<int>(gridDim.x) < params.items;
}

/// Piece number `i` of a thread block that has it.
template <KeyGradients kMode, class T>
__device__ Piece piece_of(const BackwardSm90Parameters<T>& params, const Schedule& schedule,
                          int i) {
  int block = 0;
  int whole_items = i;  // before it
  if constexpr (kMode == KeyGradients::added) {
    block = schedule.block;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      if (i == schedule.places[j]) return schedule.split[j];
      whole_items -= i > schedule.places[j];
    }
  } else {
    block = own_block();
  }
  const int number = block + whole_items * static_cast<int>(gridDim.x);
  return {number, 0, item_of(params, number).blocks, 0};
}

/// What the pieces of a split item hand on, in device memory.
inline constexpr int kCarriedWords = 3;
struct Carried {
  float* sums;            // of dQ: those of warpgroups 1 and 2, then those of the rope part
  float* rope_sums;       // by warpgroup 0
  unsigned* blocks;       // of keys that are in the sums: each of eight warps counts them
  unsigned* rope_blocks;  // likewise, by four
  unsigned* has_keys;     // 0: none so far
};

template <int kTiles, class T>
__device__ Carried carried_of(const BackwardSm90Parameters<T>& params, const Piece& piece) {
  constexpr int kSums = kHeads * kTileColumns;  // of a tile
  float* const sums = params.exchange.sums + std::int64_t{piece.carried} * (kSums * kTiles);
  unsigned* const words = params.exchange.words + piece.carried * kCarriedWords;
  return {sums, sums + kSums * kValueTiles, words, words + 1, words + 2};
}

/// Hands the sums of a piece on. Called by kThreadCount threads, of which each has the same sums
/// for every piece, so that it alone reads and overwrites them. Lane 0 releases what its warp has
/// stored before.
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

/// Takes the sums of the pieces before over, when these have handed them on. More blocks may be
/// counted by then: other warps of this piece may already have handed theirs on.
template <int kThreadCount, int kValues>
__device__ void take_over(float (&values)[kValues], const float* sums, const unsigned* blocks,
                          const Piece& piece) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      ".reg .u32 counted;\n"
      "again:\n"
      "ld.acquire.gpu.global.u32 counted, [%0];\n"
      "setp.ge.u32 done, counted, %1;\n"
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
