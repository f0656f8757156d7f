// SPDX-License-Identifier: Apache-2.0
// The constants of an item's heads, computed by warpgroup 0 in slices of a few heads.
#pragma once

#include <cstdint>

#include "cuda/sparse_attention/backward_sm90/head_constants.cuh"
#include "cuda/sparse_attention/backward_sm90/shared.cuh"

namespace winnow::cuda::sparse_attention::backward_sm90 {

/// How many heads' constants are computed at once: as many as there are registers for beside the
/// rope part of d_q.
template <int kTiles>
struct Slice {
  static constexpr int kHeadLanes = kDeltaLanes<kTiles>;  // that share a head
  static constexpr int kSliceHeads = kWarpgroup / kHeadLanes;
  static constexpr int kSlices = kHeads / kSliceHeads;
};

/// Prefetches out and d_out of a slice's heads into L2.
template <int kTiles, class T>
__device__ void prefetch_constants(const BackwardSm90Parameters<T>& params, const Item& item,
                                   int slice) {
  constexpr int kSliceHeads = Slice<kTiles>::kSliceHeads;
  constexpr int kLine = 128 / sizeof(T);
  constexpr int kLines = kValueTiles * kTileColumns / kLine;
#pragma unroll
  for (int i = static_cast<int>(threadIdx.x); i < kSliceHeads * kLines; i += kWarpgroup) {
    const int head = item.first_head + slice * kSliceHeads + i / kLines;
    if (head >= params.heads) return;
    const std::int64_t out = item.t * params.out_token_stride + head * params.out_head_stride;
    const std::int64_t d_out = item.t * params.d_out_token_stride + head * params.d_out_head_stride;
    asm volatile("prefetch.global.L2 [%0];" ::"l"(params.out + out + i % kLines * kLine));
    asm volatile("prefetch.global.L2 [%0];" ::"l"(params.d_out + d_out + i % kLines * kLine));
  }
}

/// Computes the constants of a slice's heads.
template <int kTiles, class T>
__device__ void compute_slice(const BackwardSm90Parameters<T>& params, const Item& item, int slice,
                              HeadConstants* of_heads) {
  constexpr int kHeadLanes = Slice<kTiles>::kHeadLanes;
  constexpr int kSliceHeads = Slice<kTiles>::kSliceHeads;
  const int c = static_cast<int>(threadIdx.x) % kHeadLanes;
  const int of_item = slice * kSliceHeads + static_cast<int>(threadIdx.x) / kHeadLanes;
  const int head = item.first_head + of_item;
  const bool is_head = head < params.heads;
  const HeadInputs inputs = load_inputs(params, item.t, head);
  float delta = 0;
  if (is_head) {
    const T* const out =
        params.out + item.t * params.out_token_stride + head * params.out_head_stride;
    const T* const d_out =
        params.d_out + item.t * params.d_out_token_stride + head * params.d_out_head_stride;
#pragma unroll
    for (int i = 0; i < kValueTiles * kTileColumns / (8 * kHeadLanes); ++i) {
      const int column = (i * kHeadLanes + c) * 8;
      delta += dot_8<T>(__ldg(reinterpret_cast<const uint4*>(out + column)),
                        __ldg(reinterpret_cast<const uint4*>(d_out + column)));
    }
  }
#pragma unroll
  for (int lanes = kHeadLanes / 2; lanes > 0; lanes /= 2) {
    delta += __shfl_xor_sync(0xffffffffu, delta, lanes);
  }
  HeadConstants constants{};
  if (is_head) constants = head_constants(inputs, params.sink != nullptr, delta);
  if (c == 0) of_heads[of_item] = constants;
}

/// Computes the constants of the heads of an item, before which there were `items`.
template <int kTiles, class T>
__device__ void compute_constants(const BackwardSm90Parameters<T>& params, const Item& item,
                                  SharedStorage& shared, int items) {
#pragma unroll 1
  for (int slice = 0; slice < Slice<kTiles>::kSlices; ++slice) {
    compute_slice<kTiles>(params, item, slice, constants_of(shared, items));
  }
}

}  // namespace winnow::cuda::sparse_attention::backward_sm90
