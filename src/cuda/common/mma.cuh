// SPDX-License-Identifier: Apache-2.0
// Warp-level operations on 16-bit tiles from compute capability 8.0 on: asynchronous copies into
// shared memory, loads of fragments, and mma.sync of 16 x 8 x 16 with fp32 accumulators.
#pragma once

#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace winnow::cuda {

/// Padding after every row of a tile in shared memory. With rows of a multiple of 16 elements the
/// eight rows of a fragment then begin in eight different groups of banks.
inline constexpr int kRowPadding = 8;

__device__ inline std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

/// Starts a copy of 16 bytes by cp.async; both addresses are multiples of 16.
__device__ inline void copy_16_bytes_async(void* shared, const void* global) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared_address(shared)),
               "l"(global)
               : "memory");
}
/// The same, or writes zeros where `valid` is false; then nothing is read.
__device__ inline void copy_or_clear_16_bytes_async(std::uint32_t shared, const void* global,
                                                    bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global),
               "r"(valid ? 16 : 0)
               : "memory");
}
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
/// Waits until at most `kPending` of this thread's groups of copies are pending.
template <int kPending>
__device__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

/// Loads four 8 x 8 matrices. Lane i gives the address of row i % 8 of matrix i / 8, and receives
/// of each matrix the two neighbours in row lane / 4 that begin at column lane % 4 * 2.
__device__ inline void load_fragments(std::uint32_t (&fragments)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(fragments[0]), "=r"(fragments[1]), "=r"(fragments[2]), "=r"(fragments[3])
               : "r"(shared_address(row))
               : "memory");
}
/// Loads the transposed matrices in the same way.
__device__ inline void load_fragments_transposed(std::uint32_t (&fragments)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(fragments[0]), "=r"(fragments[1]), "=r"(fragments[2]), "=r"(fragments[3])
               : "r"(shared_address(row))
               : "memory");
}

// The address that lane i gives for a 16 x 16 block of an operand, in elements from the block's
// corner. In shared memory A is [m, k] or [k, m] and B is [n, k] or [k, n]; B's 16 columns are the
// operands (0, 1) and (2, 3) of two products.
struct BlockOffset {
  int row;
  int column;
};
/// For A as [m, k] with load_fragments, and for B as [k, n] with load_fragments_transposed.
__device__ inline BlockOffset rows_first(int lane) { return {lane % 16, lane / 16 * 8}; }
/// For B as [n, k] with load_fragments, and for A as [k, m] with load_fragments_transposed.
__device__ inline BlockOffset columns_first(int lane) {
  return {lane / 16 * 8 + lane % 8, lane / 8 % 2 * 8};
}

/// c += A [16, 16] B [16, 8]. Of the accumulator a lane holds row lane / 4, columns lane % 4 * 2
/// and the next, in c[0] and c[1], and the same columns of row lane / 4 + 8 in c[2] and c[3].
template <class T>
__device__ void multiply_add(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                             std::uint32_t b1);
template <>
__device__ inline void multiply_add<__nv_bfloat16>(float (&c)[4], const std::uint32_t (&a)[4],
                                                   std::uint32_t b0, std::uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
      "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ inline void multiply_add<__half>(float (&c)[4], const std::uint32_t (&a)[4],
                                            std::uint32_t b0, std::uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, "
      "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <class T>
__device__ T from_float(float x);
template <>
__device__ inline float from_float<float>(float x) {
  return x;
}
template <>
__device__ inline __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}
template <>
__device__ inline __half from_float<__half>(float x) {
  return __float2half_rn(x);
}

/// Rounds two neighbouring elements into one word, the first in the low half.
template <class T>
__device__ std::uint32_t pack(float first, float second);
template <>
__device__ inline std::uint32_t pack<__nv_bfloat16>(float first, float second) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
  return reinterpret_cast<const std::uint32_t&>(pair);
}
template <>
__device__ inline std::uint32_t pack<__half>(float first, float second) {
  const __half2 pair = __floats2half2_rn(first, second);
  return reinterpret_cast<const std::uint32_t&>(pair);
}

/// Stores two neighbouring elements, by one instruction where the pair is aligned.
template <class T>
__device__ void store_pair(T* to, float first, float second, bool aligned) {
  if (aligned) {
    *reinterpret_cast<std::uint32_t*>(to) = pack<T>(first, second);
  } else {
    to[0] = from_float<T>(first);
    to[1] = from_float<T>(second);
  }
}

}  // namespace winnow::cuda
