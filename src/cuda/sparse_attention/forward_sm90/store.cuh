// SPDX-License-Identifier: Apache-2.0
// The end of an item: out, normalised, from registers to memory.
#pragma once

#include <cstdint>

#include "cuda/common/mma.cuh"
#include "cuda/hopper/quad.cuh"
#include "cuda/sparse_attention/forward_sm90/shared.cuh"

namespace winnow::cuda::sparse_attention::forward_sm90 {

/// Stores a warpgroup's columns, from first_column on. Four lanes write 64 bytes of a row.
template <class T>
__device__ inline void store_out(const ForwardParameters& params, const float (&out)[128],
                                 const float (&normalizers)[2], int item, int first_column) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int row = static_cast<int>(threadIdx.x) % kWarpgroup / 32 * 16 + lane / 4;
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
        words[j] = pack<T>(pair[0] * normalizers[half], pair[1] * normalizers[half]);
      }
      transpose_in_quad(words);
      if (head < params.heads) {
        *reinterpret_cast<uint4*>(target + 32 * i) =
            make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
  }
}

}  // namespace winnow::cuda::sparse_attention::forward_sm90
