// SPDX-License-Identifier: Apache-2.0
// The constants of a piece's heads, computed by warpgroup 0 between two pieces. TMA loads out and
// d_out: loads of this warpgroup would wait behind the reductions of the others.
#pragma once

#include <cstdint>

#include "cuda/hopper/tensor_copy.cuh"
#include "cuda/sparse_attention/backward_sm90/head_constants.cuh"
#include "cuda/sparse_attention/backward_sm90/shared.cuh"

namespace winnow::cuda::sparse_attention::backward_sm90 {

__device__ inline void sync_score_warps() { sync_warps<1, kWarpgroup>(); }

/// Loads four tiles of out and of d_out into the buffer of keys. Called by one thread.
__device__ inline void load_half(const CUtensorMap& out, const CUtensorMap& d_out, const Item& item,
                                 int half, SharedStorage& shared) {
  fence_proxy_async();
  shared.half_full.arrive_and_expect(2 * kSideTiles * kTileBytes);
  const auto t = static_cast<int>(item.t);
#pragma unroll 1
  for (int i = 0; i < kSideTiles; ++i) {
    const int column = (half * kSideTiles + i) * kTileColumns;
    copy_box(shared.kv[i], out, shared.half_full, column, item.first_head, t);
    copy_box(shared.kv[kSideTiles + i], d_out, shared.half_full, column, item.first_head, t);
  }
}

/// Computes the constants of a piece's heads, `pieces` being the number of those before it. The
/// buffer of keys is free. Two threads share a head, and sum as kDeltaLanes lanes would.
template <class T>
__device__ void compute_constants(const BackwardSm90Parameters<T>& params, const CUtensorMap& out,
                                  const CUtensorMap& d_out, const Item& item, int pieces,
                                  SharedStorage& shared) {
  constexpr int kParts = kDeltaLanes / 2;
  const int of_item = static_cast<int>(own_thread() / 2);
  const int first_eight = static_cast<int>(own_thread() % 2) * kParts;
  const HeadInputs inputs = load_inputs(params, item.t, item.first_head + of_item);
  float parts[kParts] = {};
#pragma unroll 1
  for (int half = 0; half < 2; ++half) {
    if (own_thread() == 0) load_half(out, d_out, item, half, shared);
    shared.half_full.wait(2 * pieces + half);
#pragma unroll
    for (int tile = 0; tile < kSideTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < kParts; ++i) {
        const std::uint32_t offset = tile_offset(of_item, first_eight + i);
        parts[i] +=
            dot_8<T>(*reinterpret_cast<const uint4*>(shared.kv[tile] + offset),
                     *reinterpret_cast<const uint4*>(shared.kv[kSideTiles + tile] + offset));
      }
    }
    sync_score_warps();  // the half has been read
  }
#pragma unroll
  for (float& part : parts) part += __shfl_xor_sync(0xffffffffu, part, 1);
  const float delta = (parts[0] + parts[2]) + (parts[1] + parts[3]);
  if (own_thread() % 2 == 0) {
    HeadConstants constants{};
    if (item.first_head + of_item < params.heads) {
      constants = head_constants(inputs, params.sink != nullptr, delta);
    }
    constants_of(shared, pieces)[of_item] = constants;
  }
}

}  // namespace winnow::cuda::sparse_attention::backward_sm90
