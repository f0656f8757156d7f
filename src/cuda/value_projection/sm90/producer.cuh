// SPDX-License-Identifier: Apache-2.0
// The producer of value_projection's products on sm_90.
#pragma once

#include "cuda/value_projection/sm90/shared.cuh"

namespace winnow::cuda::value_projection::sm90 {

/// An operand's part of a step: kCount of its rows (K-major) or columns (MN-major), `first` being
/// the first of the block's item, and 64 of k. A shared one is the same for both blocks: each
/// copies half of it to both.
template <bool kMnMajor, bool kShared, int kCount>
__device__ void copy_operand(std::byte* to, const CUtensorMap& map, Barrier& full, int first, int k,
                             int head, int rank) {
  constexpr int kOwn = kShared ? kCount / 2 : kCount;
  const auto copy = [&](int offset, int column, int row) {
    if constexpr (kShared) {
      constexpr std::uint16_t kBothBlocks = 3;
      copy_box_to_blocks(to + offset, map, full, column, row, head, kBothBlocks);
    } else {
      copy_box(to + offset, map, full, column, row, head);
    }
  };
  if constexpr (kShared) {
    first += rank * kOwn;
    to += rank * kOwn * kTileRowBytes;
  }
  if constexpr (kMnMajor) {
    for (int i = 0; i < kOwn / 64; ++i) copy(i * kTileBytes, first + i * 64, k);
  } else {
    copy(0, k, first);
  }
}

/// One thread that has TMA copy the operands of every step of the block's items.
template <Kind kKind, Pair kPair>
__device__ void produce(const Product& product, SharedStorage& shared) {
  constexpr int kStepBytes = sizeof(shared.a[0]) + sizeof(shared.b[0]);
  PipelineState<kStages> state;
  for (Items<kPair> item(product); !item.done(); item.next()) {
    for (int step = item.first_step(); step < item.end_step(); ++step, state.next()) {
      Barrier& full = shared.full[state.stage];
      shared.free[state.stage].wait(state.phase - 1);  // the consumers of both blocks have used it
      full.arrive_and_expect(kStepBytes);
      copy_operand<kAMnMajor<kKind>, kPair == Pair::along_n, kM>(
          shared.a[state.stage], product.a, full, item.m(), step * kK, item.head, item.rank);
      copy_operand<kBMnMajor<kKind>, kPair == Pair::along_m, kN>(
          shared.b[state.stage], product.b, full, item.n(), step * kK, item.head, item.rank);
    }
  }
}

}  // namespace winnow::cuda::value_projection::sm90
