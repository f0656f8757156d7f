// SPDX-License-Identifier: Apache-2.0
// What the warps of Hopper's backward kernel share: sizes and shared memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cuda/common/mma.cuh"
#include "cuda/common/own_index.cuh"
#include "cuda/common/softmax.cuh"
#include "cuda/hopper/barrier.cuh"
#include "cuda/hopper/wgmma.cuh"
#include "cuda/sparse_attention/parameters.cuh"

namespace winnow::cuda::sparse_attention::backward_sm90 {

using namespace winnow::hopper;

inline constexpr int kHeads = 64;      // of one item
inline constexpr int kStepHeads = 16;  // of one wgmma that sums over heads
inline constexpr int kBlock = 64;      // keys gathered at a time
inline constexpr int kValueTiles = 8;  // 512 channels
inline constexpr int kMaxTiles = 9;
inline constexpr int kSideTiles = kValueTiles / 2;  // of warpgroup 1, and of 2
inline constexpr int kTileBytes = 64 * kTileRowBytes;
inline constexpr int kWarpgroup = 128;
inline constexpr int kThreads = 3 * kWarpgroup;
inline constexpr int kScoreRegisters = 120;
inline constexpr int kGradientRegisters = 192;
/// What becomes of the gradient that a slot gives to its key.
enum class KeyGradients {
  added,    // to the key's row of d_kv, by atomics
  written,  // as the slot's term, which is summed later
  exact     // added in whole quanta of the key, so that no addition rounds (exact_sums_sm90.h)
};

/// The constants of one head: exp(s - lse) = exp2(s log2(e) - lse_log2); P is share times that, and
/// dS is (share * dP + offset) times that.
struct alignas(16) HeadConstants {
  float share;   // exp(lse - L), the part that the sink leaves to the keys
  float offset;  // d_lse - share * delta
  float lse_log2;
  float d_sink;  // the gradient of the sink if the query has keys
};

/// An item or a part of one.
struct Piece {
  int number;      // of the item
  int begin, end;  // blocks of keys
  int carried;     // which memory the pieces of a split item share
};

/// What a thread block takes (pieces.cuh): whole items, and up to two pieces of split ones.
struct Schedule {
  int block;      // the number under which it takes whole items
  int pieces;     // all together
  int places[2];  // of the split ones in their order; INT_MAX: there is none
  Piece split[2];
};

struct SharedStorage {
  std::byte q[kMaxTiles][kTileBytes];
  std::byte d_out[kValueTiles][kTileBytes];
  std::byte kv[kMaxTiles][kTileBytes];
  std::byte p[kTileBytes];          // [heads, keys]
  std::byte ds[kTileBytes];         // [heads, keys], times the scale
  std::int32_t keys[2][kBlock];     // of even and odd blocks; -1: none
  HeadConstants constants[kHeads];  // of even pieces; where sums are exact, of all
  union {
    HeadConstants odd_constants[kHeads];  // of odd pieces
    float inverse_quanta[2][kBlock];      // of the keys, where sums are exact
  };
  bool has_keys[2];              // of even and odd pieces
  Schedule schedule;             // of the thread block
  Barrier half_full;             // half of out and d_out has landed, for the constants
  Barrier q_full;                // a piece's q has landed
  Barrier d_out_full;            // a piece's d_out has landed
  Barrier tile_free[kMaxTiles];  // a tile of q and of d_out is no longer in use
  Barrier scores_full;           // p and ds of a block are written
  Barrier scores_free;           // p and ds are no longer in use
  Barrier kv_free;               // d_q has used a block's keys
};
static_assert(sizeof(SharedStorage) <= 227 * 1024);

/// The constants of a piece's heads, `pieces` being the number of those before it. Not where sums
/// are exact.
__device__ inline HeadConstants* constants_of(SharedStorage& shared, int pieces) {
  return pieces % 2 == 0 ? shared.constants : shared.odd_constants;
}

/// The same number, of which the compiler knows nothing: what follows from it is computed anew, as
/// from own_thread(). A spilled register is reloaded behind the reductions that wait in the same
/// queue.
__device__ inline int anew(int number) {
  asm volatile("" : "+r"(number));
  return number;
}

template <class T>
__device__ inline float2 unpack_pair(std::uint32_t pair) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(pair));
  } else {
    return __half22float2(reinterpret_cast<const __half2&>(pair));
  }
}

/// A work item: 64 heads of a query.
struct Item {
  std::int64_t t;
  int first_head;
  int slots;   // valid ones
  int blocks;  // at least one
};
template <class T>
__device__ Item item_of(const BackwardSm90Parameters<T>& params, int number) {
  Item item;
  item.t = number / params.head_groups;
  item.first_head = number % params.head_groups * kHeads;
  item.slots = slots_of_row(params, item.t);
  item.blocks = max((item.slots + kBlock - 1) / kBlock, 1);
  return item;
}

/// The number of the first slot of an item's block, counted over all rows, of which each is one
/// item where terms are written. Terms fit into memory, so there are fewer than 2^31.
template <class T>
__device__ int first_slot_of(const BackwardSm90Parameters<T>& params, int number, int block) {
  return number * params.topk + block * kBlock;
}

}  // namespace winnow::cuda::sparse_attention::backward_sm90
