// SPDX-License-Identifier: Apache-2.0
// Storing d_q from accumulators.
#pragma once

#include <cstdint>

#include "cuda/hopper/quad.cuh"
#include "cuda/sparse_attention/backward_sm90/shared.cuh"

namespace winnow::cuda::sparse_attention::backward_sm90 {

/// Stores 64 columns of d_q; the rows of the accumulator are heads.
template <class T>
__device__ void store_d_q(const BackwardSm90Parameters<T>& params, const Item& item,
                          const float* d_q, int first_column) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int row = static_cast<int>(threadIdx.x % kWarpgroup / 32) * 16 + lane / 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int head = item.first_head + row + 8 * half;
    T* const to = params.d_q + item.t * params.d_q_token_stride + head * params.d_q_head_stride +
                  first_column + lane % 4 * 8;
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      std::uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* const pair = d_q + 16 * part + 4 * i + 2 * half;
        words[i] = pack<T>(pair[0], pair[1]);
      }
      transpose_in_quad(words);
      if (head < params.heads) {
        *reinterpret_cast<uint4*>(to + 32 * part) =
            make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
  }
}

}  // namespace winnow::cuda::sparse_attention::backward_sm90
