// SPDX-License-Identifier: Apache-2.0
// Operations of a quad: the four lanes that share a row of a fragment or an accumulator.
#pragma once

#include <cstdint>

namespace winnow::hopper {

/// The largest of the quad's four values.
__device__ inline float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

/// The sum of the quad's four values.
__device__ inline float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

/// Transposes 4 x 4 words: word i of lane c becomes word c of lane i. This turns 16 contiguous
/// bytes a lane into the pairs of columns that a fragment holds, and back.
__device__ inline void transpose_in_quad(std::uint32_t (&v)[4]) {
  const bool odd = threadIdx.x & 1;
  const bool high = threadIdx.x & 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const std::uint32_t got = __shfl_xor_sync(0xffffffffu, odd ? v[i] : v[i + 1], 1);
    v[i] = odd ? got : v[i];
    v[i + 1] = odd ? v[i + 1] : got;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const std::uint32_t got = __shfl_xor_sync(0xffffffffu, high ? v[i] : v[i + 2], 2);
    v[i] = high ? got : v[i];
    v[i + 2] = high ? v[i + 2] : got;
  }
}

}  // namespace winnow::hopper
