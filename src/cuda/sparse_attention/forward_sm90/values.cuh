// SPDX-License-Identifier: Apache-2.0
// Warpgroups 1 and 2: out = P V, and the gathering of keys.
#pragma once

#include <cstdint>

#include "cuda/hopper/quad.cuh"
#include "cuda/sparse_attention/forward_sm90/gather.cuh"
#include "cuda/sparse_attention/forward_sm90/shared.cuh"

namespace winnow::cuda::forward {

template <class T>
__device__ void store_out(const Params<T>& params, const float (&out)[128],
                          const float (&finish)[2], int item, int first_column) {
  const int lane = threadIdx.x % 32;
  const int row = (threadIdx.x % kWarpgroup) / 32 * 16 + lane / 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int head = (item % params.head_blocks) * kHeads + row + 8 * half;
    T* target = params.out + (item / params.head_blocks) * params.out_row + head * params.out_head +
                first_column + (lane % 4) * 8;
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
__device__ void compute_values(const Params<T>& params, SharedStorage& shared) {
  const int side = static_cast<int>(threadIdx.x) / kWarpgroup - 1;  // 0: left
  const int warp = (threadIdx.x % kWarpgroup) / 32;
  const int row = warp * 16 + (threadIdx.x % 32) / 4;
  const bool is_first_lane = threadIdx.x % 32 == 0;

  Gatherer<T> gatherer(params);
  for (int stage = 0; stage < kStages; ++stage) {
    gatherer.template gather<kTiles>(shared, Turn{stage, 0});
  }

  Turn turn;
  for (int item = static_cast<int>(blockIdx.x); item < params.items;
       item += static_cast<int>(gridDim.x)) {
    float out[128] = {};
    float finish[2];
    for (bool is_last = false; !is_last; turn.next()) {
      shared.ready[turn.stage].wait(turn.round);
      if (shared.rescales[turn.stage][warp]) {
        const float low = shared.rescale[turn.stage][row];
        const float high = shared.rescale[turn.stage][row + 8];
#pragma unroll
        for (int i = 0; i < 128; ++i) out[i] *= i % 4 < 2 ? low : high;
      }
      // One lane reads what the next user of the stage writes once that lane has freed it.
      is_last = __shfl_sync(0xffffffffu, is_first_lane && shared.info[turn.stage].is_last, 0);
      finish[0] = shared.finish[turn.stage][row];
      finish[1] = shared.finish[turn.stage][row + 8];

      fence_for_products();
      wgmma_fence();
      const std::uint32_t stage = shared_address(shared.stages[turn.stage]);
      const std::uint64_t p = slice_contracted(stage + (kStageTiles - 1) * kTileBytes);
      const std::uint64_t values =
          column_contracted(stage + side * (kValueTiles / 2) * kTileBytes, kTileBytes);
#pragma unroll
      for (int i = 0; i < kBlock / 16; ++i) {
        multiply_64x256x16<T>(out, p + i * (kSliceBytes >> 4), values + i * kNext16Rows, 1);
      }
      wgmma_commit();
      wgmma_wait<0>();  // meanwhile the matrix units have the scores of the next block, too
      if (is_first_lane) shared.free[turn.stage].arrive();
      gatherer.template gather<kTiles>(shared, Turn{turn.stage, turn.round + 1});
    }
    store_out(params, out, finish, item, side * (kValueTiles / 2) * kTileColumns);
  }
}

}  // namespace winnow::cuda::forward
