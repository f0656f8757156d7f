// SPDX-License-Identifier: Apache-2.0
// What the warps of Hopper's kernels over windows share: parameters, the windows of a pair of rows,
// shared memory.
#pragma once

#include <cstdint>

#include "cuda/common/row_slots.cuh"
#include "cuda/index_loss/sm90/products.cuh"

namespace winnow::cuda::window_sm90 {

using namespace target_sm90;

inline constexpr int kPair = 2;  // rows of an item, one a consumer warpgroup
inline constexpr int kConsumerRegisters = 232;
inline constexpr int kProducerRegisters = 40;

/// One pass over up to 64 heads of every row, beside the tensor maps of q and of the keys.
struct Parameters {
  Heads heads = {};
  const float* weights = nullptr;  // [tokens, heads], of the indexer
  float* lse = nullptr;            // [tokens, heads], out
  float* sums = nullptr;           // [tokens, slots], out
  std::int64_t weights_stride = 0;
  std::int64_t sums_stride = 0;
  SlotLists slots = {};  // windows
  std::int32_t tokens = 0;
  std::int32_t items = 0;
  std::int32_t first_head = 0;
  float scale = 0;
  bool adds = false;  // to what sums holds
};

/// The windows of two neighbouring rows, which overlap nearly always, and the blocks that cover
/// both. Keys are those of the indexer.
struct WindowPair {
  int begin[kPair], end[kPair];
  int first;  // key of the first block
  int last;   // one past the last key

  /// Items are counted from the last rows, whose windows are often the longest.
  __device__ static int first_row(const Parameters& params, int item) {
    return (params.items - 1 - item) * kPair;
  }

  __device__ WindowPair(const Parameters& params, int item) {
#pragma unroll
    for (int i = 0; i < kPair; ++i) {
      const int t = first_row(params, item) + i;
      begin[i] = end[i] = 0;
      if (t < params.tokens) {
        const RowSlots row = params.slots.row(t);
        begin[i] = row.first;
        end[i] = row.first + row.count;
      }
    }
    const bool empty0 = begin[0] == end[0];
    const bool empty1 = begin[1] == end[1];
    const int earlier = empty0 ? begin[1] : empty1 ? begin[0] : min(begin[0], begin[1]);
    // Where a block begins decides in which order a row's keys are summed, and that must not depend
    // on the row beside it.
    first = earlier / kBlock * kBlock;
    last = empty0 ? end[1] : empty1 ? end[0] : max(end[0], end[1]);
  }

  /// Whether the block that begins at `key` has keys of row i's window.
  __device__ bool touches(int i, int key) const { return key < end[i] && key + kBlock > begin[i]; }

  /// Calls body(key) for every block that has keys of a window.
  template <class Body>
  __device__ void for_each_block(const Body& body) const {
    for (int key = first; key < last; key += kBlock) {
      if (touches(0, key) || touches(1, key)) body(key);
    }
  }
};

template <class Shape>
struct SharedStorage {
  KeyRing<Shape> ring;
  float partial[kPair][2][kGroupWarps][kBlock];  // of each row: sums over heads, in turns
};

}  // namespace winnow::cuda::window_sm90
