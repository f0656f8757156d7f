// SPDX-License-Identifier: Apache-2.0
// The consumer warpgroups of value_projection's products on sm_90.
#pragma once

#include <type_traits>

#include "cuda/common/mma.cuh"
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
template <class T, Kind kKind, int kCluster, int kStages>
__device__ void accumulate(float (&c)[128], SharedStorage<kStages>& shared,
                           PipelineState<kStages>& state, int steps, int side) {
  constexpr bool kAMn = kAMnMajor<kKind>;
  constexpr bool kBMn = kBMnMajor<kKind>;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const auto free_stage = [&](int stage) {
    if constexpr (kCluster > 1) {
      if (lane < kCluster) arrive_at_block(shared.free[stage], lane);
    } else {
      if (lane == 0) shared.free[stage].arrive();
    }
  };
  int previous = -1;
  for (int step = 0; step < steps; ++step, state.next()) {
    const std::uint64_t a = descriptor<kAMn>(shared.a[state.stage] + side * kTileBytes);
    const std::uint64_t b = descriptor<kBMn>(shared.b[state.stage]);
    shared.full[state.stage].wait(state.phase);
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < kK / 16; ++j) {
      multiply_64x256<T, kAMn, kBMn>(c, a + j * kNext<kAMn>, b + j * kNext<kBMn>, step + j > 0);
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
template <class T, int kStages>
__device__ void store_by_tokens(const float (&c)[128], const Product& product,
                                SharedStorage<kStages>& shared, const Item& item, int side) {
  constexpr int kRows = SharedStorage<kStages>::kStoreRows;
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
      store_box(product.c, shared.c[side], item.m + side * 64, item.n + first, item.head);
  }
}

/// Writes c to d_w_v or to one of its parts, or adds it.
template <class Out>
__device__ void store_d_w(const float (&c)[128], const Product& product, const Item& item,
                          int side) {
  const int thread = static_cast<int>(threadIdx.x) % kWarpgroup;
  const int lane = thread % 32;
  const bool has_terms = item.first_step < item.end_step;
  Out* const head = static_cast<Out*>(product.d_w) + item.part * product.d_w_part_stride +
                    item.head * product.d_w_head_stride;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = item.m + side * 64 + thread / 32 * 16 + half * 8 + lane / 4;
    if (row >= product.m) continue;
    Out* const to = head + row * product.d_w_stride + item.n + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < kN / 8; ++i) {
      if (item.n + i * 8 >= product.n) continue;
      const float first = has_terms ? c[i * 4 + half * 2] : 0.0f;
      const float second = has_terms ? c[i * 4 + half * 2 + 1] : 0.0f;
      if constexpr (std::is_same_v<Out, float>) {
        float2& pair = *reinterpret_cast<float2*>(to + i * 8);
        pair = product.adds ? float2{pair.x + first, pair.y + second} : float2{first, second};
      } else {
        store_pair(to + i * 8, first, second, true);
      }
    }
  }
}

template <class T, class Out, Kind kKind, int kCluster, int kStages>
__device__ void consume(const Product& product, SharedStorage<kStages>& shared) {
  const int side = static_cast<int>(threadIdx.x) / kWarpgroup - 1;
  const int rank = kCluster > 1 ? block_rank() : 0;
  PipelineState<kStages> state;
  for (std::int64_t i = blockIdx.x / kCluster; i < product.items; i += gridDim.x / kCluster) {
    const Item item = item_of<kCluster>(product, i, rank);
    float c[128];
    accumulate<T, kKind, kCluster>(c, shared, state, item.end_step - item.first_step, side);
    if constexpr (kKind == Kind::d_w) {
      store_d_w<Out>(c, product, item, side);
    } else {
      store_by_tokens<T>(c, product, shared, item, side);
    }
  }
  // Shared memory is the block's only until it ends.
  if (kKind != Kind::d_w && threadIdx.x % kWarpgroup == 0) wait_for_stores<0>();
}

}  // namespace winnow::cuda::value_projection::sm90
