// SPDX-License-Identifier: Apache-2.0
// The producer of value_projection's products on sm_90.
#pragma once

#include "cuda/value_projection/sm90/shared.cuh"

namespace winnow::cuda::value_projection::sm90 {

/// One thread that has TMA copy the operands of every step of the block's items. The blocks of a
/// cluster have the same columns: each copies its share of b to all of them.
template <Kind kKind, int kCluster, int kStages>
__device__ void produce(const Product& product, SharedStorage<kStages>& shared) {
  constexpr int kStepBytes = sizeof(shared.a[0]) + sizeof(shared.b[0]);
  constexpr int kShare = kN / kCluster;  // columns of b that this block copies
  constexpr std::uint16_t kBlocks = (1 << kCluster) - 1;
  const int rank = kCluster > 1 ? block_rank() : 0;
  PipelineState<kStages> state;

  for (std::int64_t i = blockIdx.x / kCluster; i < product.items; i += gridDim.x / kCluster) {
    const Item item = item_of<kCluster>(product, i, rank);
    for (int step = item.first_step; step < item.end_step; ++step, state.next()) {
      const int k = step * kK;
      std::byte* const a = shared.a[state.stage];
      std::byte* const b = shared.b[state.stage] + rank * kShare * kTileRowBytes;
      Barrier& full = shared.full[state.stage];
      // The consumers of all blocks of the cluster have used the stage.
      shared.free[state.stage].wait(state.phase - 1);
      full.arrive_and_expect(kStepBytes);
      if constexpr (kAMnMajor<kKind>) {
        for (int j = 0; j < kM / 64; ++j)
          copy_box(a + j * kTileBytes, product.a, full, item.m + j * 64, k, item.head);
      } else {
        copy_box(a, product.a, full, k, item.m, item.head);
      }
      const auto copy_b = [&](int offset, int column, int row) {
        if constexpr (kCluster > 1) {
          copy_box_to_blocks(b + offset, product.b, full, column, row, item.head, kBlocks);
        } else {
          copy_box(b + offset, product.b, full, column, row, item.head);
        }
      };
      const int n = item.n + rank * kShare;
      if constexpr (kBMnMajor<kKind>) {
        for (int j = 0; j < kShare / 64; ++j) copy_b(j * kTileBytes, n + j * 64, k);
      } else {
        copy_b(0, k, n);
      }
    }
  }
}

}  // namespace winnow::cuda::value_projection::sm90
