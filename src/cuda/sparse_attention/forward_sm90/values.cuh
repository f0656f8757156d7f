// SPDX-License-Identifier: Apache-2.0
// Warpgroups 1 and 2: out = P V, and the gather of keys.
#pragma once

#include <cstdint>

#include "cuda/hopper/quad.cuh"
#include "cuda/sparse_attention/forward_sm90/gather.cuh"
#include "cuda/sparse_attention/forward_sm90/shared.cuh"

namespace winnow::cuda::sparse_attention::forward_sm90 {

template <class T>
__device__ void store_out(const ForwardParameters& params, const float (&out)[128],
                          const float (&finish)[2], int item, int first_column) {
  const int lane = threadIdx.x % 32;
  const int row = (threadIdx.x % kWarpgroup) / 32 * 16 + lane / 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int head = (item % params.head_groups) * kHeads + row + 8 * half;
    T* target = static_cast<T*>(params.out) +
                (item / params.head_groups) * params.out_token_stride +
                head * params.out_head_stride + first_column + (lane % 4) * 8;
#pragma unroll
    for (int i = 0; i < 8; ++i) {  // 32 columns at a time
      std::uint32_t words[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float* pair = &out[16 * i + 4 * j + 2 * half];
        words[j] = pack<T>(pair[0] * finish[half], pair[1] * finish[half]);
      }
      transpose_in_quad(words);
      if (head < params.heads) {
        *reinterpret_cast<uint4*>(target + 32 * i) =
            make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
  }
}

template <class T, int kTiles>
__device__ void compute_values(const ForwardParameters& params, SharedStorage& shared) {
  const int side = static_cast<int>(threadIdx.x) / kWarpgroup - 1;  // 0: left
  const int warp = (threadIdx.x % kWarpgroup) / 32;
  const int row = warp * 16 + (threadIdx.x % 32) / 4;
  const bool is_first_lane = threadIdx.x % 32 == 0;

  Gatherer<T> gatherer(params);
  for (int stage = 0; stage < kStages; ++stage) {
    gatherer.template gather<kTiles>(shared, PipelineState{stage, 0});
  }

  PipelineState pipeline;
  for (int item = static_cast<int>(blockIdx.x); item < params.items;
       item += static_cast<int>(gridDim.x)) {
    float out[128] = {};
    float finish[2];
    for (bool is_last = false; !is_last; pipeline.next()) {
      shared.ready[pipeline.stage].wait(pipeline.phase);
      if (shared.rescales[pipeline.stage][warp]) {
        const float low = shared.rescale[pipeline.stage][row];
        const float high = shared.rescale[pipeline.stage][row + 8];
#pragma unroll
        for (int i = 0; i < 128; ++i) out[i] *= i % 4 < 2 ? low : high;
      }
      // Only lane 0 reads `is_last`: once it frees the stage, the gather overwrites it.
      is_last = __shfl_sync(0xffffffffu, is_first_lane && shared.info[pipeline.stage].is_last, 0);
      finish[0] = shared.finish[pipeline.stage][row];
      finish[1] = shared.finish[pipeline.stage][row + 8];

      fence_proxy_async();
      wgmma_fence();
      const std::uint32_t stage = shared_address(shared.stages[pipeline.stage]);
      const std::uint64_t p = k_major_slice(stage + (kStageTiles - 1) * kTileBytes);
      const std::uint64_t values =
          mn_major(stage + side * (kValueTiles / 2) * kTileBytes, kTileBytes);
#pragma unroll
      for (int i = 0; i < kBlock / 16; ++i) {
        multiply_64x256x16<T>(out, p + i * (kSliceBytes >> 4), values + i * kNextMnMajor, 1);
      }
      wgmma_commit();
      wgmma_wait<0>();  // meanwhile the tensor cores also have the scores of the next block
      if (is_first_lane) shared.free[pipeline.stage].arrive();
      gatherer.template gather<kTiles>(shared, PipelineState{pipeline.stage, pipeline.phase + 1});
    }
    store_out<T>(params, out, finish, item, side * (kValueTiles / 2) * kTileColumns);
  }
}

}  // namespace winnow::cuda::sparse_attention::forward_sm90
