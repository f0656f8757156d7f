// SPDX-License-Identifier: Apache-2.0
// 64 columns of the gradients of 64 keys: their products, and emitting them to device memory
// straight from the accumulators.
#pragma once

#include <cstdint>

#include "cuda/sparse_attention/backward_sm90/shared.cuh"

namespace winnow::cuda::sparse_attention::backward_sm90 {

/// x in quanta, rounded to the nearest integer; |x| is at most 2^23 quanta.
__device__ inline float whole_quanta(float x, float inverse_quantum) {
  // From 2^23 to 2^24 floats are the integers.
  const float shift = __int_as_float((__float_as_int(x) & 0x80000000) ^ __float_as_int(-0x1p24f));
  return __fadd_rn(__fmaf_rn(x, inverse_quantum, shift), -shift);
}

template <KeyGradients kMode>
__device__ void emit_4(float* to, const float (&x)[4]) {
  if constexpr (kMode == KeyGradients::written) {
    *reinterpret_cast<float4*>(to) = make_float4(x[0], x[1], x[2], x[3]);
    return;
  }
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x[0]), "f"(x[1]),
               "f"(x[2]), "f"(x[3])
               : "memory");
}

/// A block of a query's keys.
struct KeyBlock {
  const std::int32_t (&keys)[kBlock];
  const float (&inverse_quanta)[kBlock];  // where sums are exact
  int first_slot;                         // where terms are written: counted over all rows
};

/// Adds or writes 2 kValues columns from first_column on of the gradients of a block's keys, in
/// fragment order (common/key_sums.cuh), in which the four values that a lane has of 16 columns are
/// neighbours. Two neighbouring quads swap halves, so that with one instruction eight lanes emit a
/// line of 128 bytes of a row: L2 adds full lines fastest.
template <KeyGradients kMode, int kValues, class T>
__device__ void emit_columns(const BackwardSm90Parameters<T>& params, const KeyBlock& block,
                             const float (&gradients)[kValues], int first_column) {
  // Slots take registers of their own where terms are written.
  const unsigned thread = kMode == KeyGradients::written ? own_thread() : threadIdx.x;
  const int lane = static_cast<int>(thread % 32);
  const int warp = static_cast<int>(thread % kWarpgroup / 32);
  const int first_row = warp * 16 + lane / 8 * 2;
  const bool is_odd = lane & 4;  // of the quad
  float* const column = params.d_kv + first_column + lane % 8 * 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {  // rows lane / 4, then lane / 4 + 8
    const int row = first_row + 8 * half;
    const int2 pair = *reinterpret_cast<const int2*>(&block.keys[row]);
    constexpr bool kWritten = kMode == KeyGradients::written;
    const std::int64_t even = kWritten ? block.first_slot + row : pair.x;
    const std::int64_t odd = kWritten ? block.first_slot + row + 1 : pair.y;
    float* const even_row = column + even * params.d_kv_stride;
    float* const odd_row = column + odd * params.d_kv_stride;
#pragma unroll
    for (int line = 0; line < kValues / 16; ++line) {  // of 32 columns
      // Of both rows the even quad takes the first 16 columns, the odd one the others.
      float of_even_row[4];
      float of_odd_row[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float low = gradients[16 * line + i / 2 * 4 + 2 * half + i % 2];
        const float high = gradients[16 * line + 8 + i / 2 * 4 + 2 * half + i % 2];
        const float got = __shfl_xor_sync(0xffffffffu, is_odd ? low : high, 4);
        of_even_row[i] = is_odd ? got : low;
        of_odd_row[i] = is_odd ? high : got;
      }
      if constexpr (kMode == KeyGradients::exact) {
        const float2 inverse = *reinterpret_cast<const float2*>(&block.inverse_quanta[row]);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          of_even_row[i] = whole_quanta(of_even_row[i], inverse.x);
          of_odd_row[i] = whole_quanta(of_odd_row[i], inverse.y);
        }
      }
      if (pair.x >= 0) emit_4<kMode>(even_row + 32 * line, of_even_row);
      if (pair.y >= 0) emit_4<kMode>(odd_row + 32 * line, of_odd_row);
    }
  }
}

/// Computes dKV = dS^T Q + P^T dO of one tile's columns. Heads beyond kHeadSteps steps are not
/// there: their products would be zeros.
template <class T, int kHeadSteps>
__device__ void compute_key_gradients(SharedStorage& shared, int tile, float (&gradients)[32]) {
  const std::uint64_t p = mn_major(shared_address(shared.p), kTileBytes);
  const std::uint64_t ds = mn_major(shared_address(shared.ds), kTileBytes);
  const std::uint64_t q = mn_major(shared_address(shared.q[tile]), kTileBytes);
  const std::uint64_t d_out = mn_major(shared_address(shared.d_out[tile]), kTileBytes);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < kHeadSteps; ++i) {
    multiply_64x64x16<T, 1, 1>(gradients, ds + i * kNextMnMajor, q + i * kNextMnMajor, i > 0);
  }
#pragma unroll
  for (int i = 0; i < kHeadSteps; ++i) {
    multiply_64x64x16<T, 1, 1>(gradients, p + i * kNextMnMajor, d_out + i * kNextMnMajor, 1);
  }
  wgmma_commit();
  wgmma_wait<0>();
}

/// Computes dKV = dS^T Q of one half of the rope's columns, which are no values.
template <class T, int kHeadSteps>
__device__ void compute_rope_gradients(SharedStorage& shared, int half, float (&gradients)[16]) {
  const std::uint64_t ds = mn_major(shared_address(shared.ds), kTileBytes);
  const std::uint64_t q =
      mn_major(shared_address(shared.q[kValueTiles]) + half * kTileRowBytes / 2, kTileBytes);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < kHeadSteps; ++i) {
    multiply_64x32x16<T, 1, 1>(gradients, ds + i * kNextMnMajor, q + i * kNextMnMajor, i > 0);
  }
  wgmma_commit();
  wgmma_wait<0>();
}

}  // namespace winnow::cuda::sparse_attention::backward_sm90
