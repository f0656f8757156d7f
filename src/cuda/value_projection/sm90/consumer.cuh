// SPDX-License-Identifier: Apache-2.0
// The consumer warpgroups of value_projection's products on sm_90.
#pragma once

#include <type_traits>

#include "cuda/common/mma.cuh"
#include "cuda/hopper/store_matrices.cuh"
#include "cuda/value_projection/sm90/shared.cuh"

namespace winnow::cuda::value_projection::sm90 {

/// Waits for the threads of consumer warpgroup `side`.
__device__ inline void sync_side(int side) {
  if (side == 0) {
    sync_warps<1, kWarpgroup>();
  } else {
    sync_warps<2, kWarpgroup>();
  }
}

/// A descriptor, and the distance to that of the next 16 elements of k.
template <bool kMnMajor>
__device__ inline std::uint64_t descriptor(const std::byte* operand) {
  return kMnMajor ? mn_major(shared_address(operand), kTileBytes)
                  : k_major(shared_address(operand));
}
template <bool kMnMajor>
inline constexpr std::uint64_t kNext = kMnMajor ? kNextMnMajor : kNextKMajor;

/// Sums 64 x 256 of an item over all steps. While the products of a step run, those of the next are
/// started; then the stage of the first is freed.
template <class T, Kind kKind>
__device__ void accumulate(float (&c)[128], SharedStorage& shared, PipelineState<kStages>& state,
                           int steps, int side) {
  constexpr bool kAMn = kAMnMajor<kKind>;
  constexpr bool kBMn = kBMnMajor<kKind>;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const auto free_stage = [&](int stage) {
    if (lane < 2) arrive_at_block(shared.free[stage], lane);
  };
  int previous = -1;
  for (int step = 0; step < steps; ++step, state.next()) {
    const std::uint64_t a = descriptor<kAMn>(shared.a[state.stage] + side * kTileBytes);
    const std::uint64_t b = descriptor<kBMn>(shared.b[state.stage]);
    shared.full[state.stage].wait(state.phase);
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < kK / 16; ++j) {
      multiply_64x256x16<T, kAMn, kBMn>(c, a + j * kNext<kAMn>, b + j * kNext<kBMn>, step + j > 0);
    }
    wgmma_commit();
    wgmma_wait<1>();
    if (previous >= 0) free_stage(previous);
    previous = state.stage;
  }
  wgmma_wait<0>();
  if (previous >= 0) free_stage(previous);
}

/// Rounds c and stores its transpose through shared memory: rows of c^T are tokens, and TMA leaves
/// out what the tensor does not have.
template <class T, Pair kPair>
__device__ void store_by_tokens(const float (&c)[128], const Items<kPair>& item,
                                SharedStorage& shared, int side) {
  constexpr int kRows = SharedStorage::kStoreRows;
  const int thread = static_cast<int>(threadIdx.x) % kWarpgroup;
  const int lane = thread % 32;
  // Of the four matrices that a lane stores at a time, the first and the third are rows 0-7 of the
  // warp's 16 rows of c, the others rows 8-15; the last two are 8 columns on.
  const int matrix = lane / 8;
  const int piece = thread / 32 * 2 + matrix % 2;
  const std::uint32_t to =
      shared_address(shared.c[side]) + tile_offset(matrix / 2 * 8 + lane % 8, piece);
#pragma unroll
  for (int first = 0; first < kN; first += kRows) {
    if (thread == 0) wait_for_stores<0>();
    sync_side(side);  // TMA has read what was stored before
#pragma unroll
    for (int i = 0; i < kRows / 16; ++i) {
      const int first_sum = first / 2 + i * 8;
      std::uint32_t words[4];
#pragma unroll
      for (int j = 0; j < 4; ++j)
        words[j] = pack<T>(c[first_sum + j * 2], c[first_sum + j * 2 + 1]);
      store_transposed(to + i * 16 * kTileRowBytes, words);
    }
    fence_proxy_async();
    sync_side(side);  // all rows are written
    if (thread == 0)
      store_box(item.product.c, shared.c[side], item.m() + side * 64, item.n() + first, item.head);
  }
}

/// Stores c through shared memory, or adds it to what is there, in boxes of 128 bytes a row.
template <class Out, Pair kPair>
__device__ void store_d_w(const float (&c)[128], const Items<kPair>& item, SharedStorage& shared,
                          int side) {
  constexpr int kColumns = kTileRowBytes / static_cast<int>(sizeof(Out));  // of a box
  constexpr int kBoxes = sizeof(shared.c[0]) / kTileBytes;                 // at a time
  const int thread = static_cast<int>(threadIdx.x) % kWarpgroup;
  const int lane = thread % 32;
  const int first_row = thread / 32 * 16;
  const bool has_terms = item.step_count() > 0;
  const auto sum = [&](int i) { return has_terms ? c[i] : 0.0f; };
#pragma unroll
  for (int first = 0; first < kN; first += kBoxes * kColumns) {
    if (thread == 0) wait_for_stores<0>();
    sync_side(side);  // TMA has read what was stored before
#pragma unroll
    for (int column = 0; column < kBoxes * kColumns; column += 16) {
      std::byte* const box = shared.c[side] + column / kColumns * kTileBytes;
      const int first_sum = (first + column) / 2;
      if constexpr (std::is_same_v<Out, float>) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // 8 rows and 8 columns of the 16 x 16
          const int row = first_row + i % 2 * 8 + lane / 4;
          const int piece = column % kColumns / 4 + i / 2 * 2 + lane % 4 / 2;
          *reinterpret_cast<float2*>(box + tile_offset(row, piece) + lane % 2 * 8) = {
              sum(first_sum + i * 2), sum(first_sum + i * 2 + 1)};
        }
      } else {
        std::uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
          words[i] = pack<Out>(sum(first_sum + i * 2), sum(first_sum + i * 2 + 1));
        const int matrix = lane / 8;
        const int row = first_row + matrix % 2 * 8 + lane % 8;
        store_matrices(shared_address(box) + tile_offset(row, column % kColumns / 8 + matrix / 2),
                       words);
      }
    }
    fence_proxy_async();
    sync_side(side);  // all rows are written
    if (thread != 0) continue;
    for (int i = 0; i < kBoxes; ++i) {
      const Product& product = item.product;
      const std::byte* const box = shared.c[side] + i * kTileBytes;
      const int column = item.n() + first + i * kColumns;
      const int plane = item.part * product.heads + item.head;
      if (product.adds) {
        add_box(product.c, box, column, item.m() + side * 64, plane);
      } else {
        store_box(product.c, box, column, item.m() + side * 64, plane);
      }
    }
  }
}

template <class T, class Out, Kind kKind, Pair kPair>
__device__ void consume(const Product& product, SharedStorage& shared) {
  const int side = static_cast<int>(threadIdx.x) / kWarpgroup - 1;
  PipelineState<kStages> state;
  for (Items<kPair> item(product); !item.done(); item.next()) {
    float c[128];
    accumulate<T, kKind>(c, shared, state, item.step_count(), side);
    if constexpr (kKind == Kind::d_w) {
      store_d_w<Out>(c, item, shared, side);
    } else {
      store_by_tokens<T>(c, item, shared, side);
    }
  }
  // Shared memory is the block's only until it ends.
  if (threadIdx.x % kWarpgroup == 0) wait_for_stores<0>();
}

}  // namespace winnow::cuda::value_projection::sm90
