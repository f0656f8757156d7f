// SPDX-License-Identifier: Apache-2.0
// wgmma, Hopper's asynchronous matrix products: descriptors of shared memory, the shapes in use,
// and their ordering.
#pragma once

#include <cstdint>
#include <type_traits>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "cuda/hopper/barrier.cuh"
#include "cuda/hopper/registers.cuh"

namespace winnow::hopper {

// A tile is some rows of 64 two-byte elements with the 128-byte swizzle: the 16-byte piece c of row
// r is stored at piece c ^ (r % 8). It starts at a multiple of 1024 bytes.
inline constexpr int kTileColumns = 64;
inline constexpr int kTileRowBytes = 128;

/// The byte offset of the 16-byte piece `piece` of row `row` in a tile.
__device__ inline std::uint32_t tile_offset(int row, int piece) {
  return row * kTileRowBytes + ((piece ^ (row & 7)) << 4);
}

/// The descriptor of a K-major operand: k runs along the rows of a tile (Q, K of Q K^T). The next
/// 16 elements of k are 32 bytes on, 2 units of the descriptor.
__device__ inline std::uint64_t k_major(std::uint32_t shared_address) {
  constexpr std::uint64_t kEightRows = 1024 >> 4;
  return (std::uint64_t{1} << 62) | (kEightRows << 32) | (std::uint64_t{1} << 16) |
         ((shared_address & 0x3ffff) >> 4);
}
inline constexpr std::uint64_t kNextKMajor = 32 >> 4;

/// The descriptor of an MN-major operand: k runs down the rows of tiles, of tile_bytes each, that
/// are side by side (V of P V). The next 16 elements of k are 16 rows, 2048 bytes on.
__device__ inline std::uint64_t mn_major(std::uint32_t shared_address, std::uint64_t tile_bytes) {
  constexpr std::uint64_t kEightRows = 1024 >> 4;
  return (std::uint64_t{1} << 62) | (kEightRows << 32) | ((tile_bytes >> 4) << 16) |
         ((shared_address & 0x3ffff) >> 4);
}
inline constexpr std::uint64_t kNextMnMajor = 2048 >> 4;

/// Called before the first product of a group, after writes to registers that it reads or
/// accumulates in.
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
/// Waits until at most `kPending` groups of this warp's products are pending.
template <int kPending>
__device__ inline void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

/// Raises the registers of this warpgroup to kRegisters a thread. Even where that changes nothing
/// it tells the compiler what a role may use.
template <int kRegisters>
__device__ inline void grow_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

/// Lowers the registers of this warpgroup to kRegisters a thread; other warpgroups can take the
/// rest by grow_registers.
template <int kRegisters>
__device__ inline void shrink_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Accumulators: of every 8 columns i, lane 4g + c of warp w holds columns 8i + 2c and 8i + 2c + 1,
// of row 16w + g in d[4i] and d[4i + 1], of row 16w + g + 8 in d[4i + 2] and d[4i + 3]. accumulate
// = 0 overwrites d. An operand in shared memory is K-major, or MN-major where its template argument
// is 1.

/// d (64 x 16) += A (64 x 16) * B (16 x 16), both in shared memory.
template <class T, int kAMnMajor, int kBMnMajor>
__device__ inline void multiply_64x16x16(float (&d)[8], std::uint64_t a, std::uint64_t b,
                                         int accumulate) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %10, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {" WINNOW_REGISTERS_8
        "}, %8, %9, p, 1, 1, %11, %12;\n"
        "}\n"
        : WINNOW_OPERANDS_8(d)
        : "l"(a), "l"(b), "r"(accumulate), "n"(kAMnMajor), "n"(kBMnMajor));
  } else {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %10, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {" WINNOW_REGISTERS_8
        "}, %8, %9, p, 1, 1, %11, %12;\n"
        "}\n"
        : WINNOW_OPERANDS_8(d)
        : "l"(a), "l"(b), "r"(accumulate), "n"(kAMnMajor), "n"(kBMnMajor));
  }
}

/// d (64 x 32) += A (64 x 16) * B (16 x 32), both in shared memory.
template <class T, int kAMnMajor, int kBMnMajor>
__device__ inline void multiply_64x32x16(float (&d)[16], std::uint64_t a, std::uint64_t b,
                                         int accumulate) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %18, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {" WINNOW_REGISTERS_16
        "}, %16, %17, p, 1, 1, %19, %20;\n"
        "}\n"
        : WINNOW_OPERANDS_16(d)
        : "l"(a), "l"(b), "r"(accumulate), "n"(kAMnMajor), "n"(kBMnMajor));
  } else {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %18, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {" WINNOW_REGISTERS_16
        "}, %16, %17, p, 1, 1, %19, %20;\n"
        "}\n"
        : WINNOW_OPERANDS_16(d)
        : "l"(a), "l"(b), "r"(accumulate), "n"(kAMnMajor), "n"(kBMnMajor));
  }
}

/// d (64 x 64) += A (64 x 16) * B (16 x 64), both in shared memory.
template <class T, int kAMnMajor, int kBMnMajor>
__device__ inline void multiply_64x64x16(float (&d)[32], std::uint64_t a, std::uint64_t b,
                                         int accumulate) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" WINNOW_REGISTERS_32
        "}, %32, %33, p, 1, 1, %35, %36;\n"
        "}\n"
        : WINNOW_OPERANDS_32(d)
        : "l"(a), "l"(b), "r"(accumulate), "n"(kAMnMajor), "n"(kBMnMajor));
  } else {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" WINNOW_REGISTERS_32
        "}, %32, %33, p, 1, 1, %35, %36;\n"
        "}\n"
        : WINNOW_OPERANDS_32(d)
        : "l"(a), "l"(b), "r"(accumulate), "n"(kAMnMajor), "n"(kBMnMajor));
  }
}

/// d (64 x 64) += A (64 x 16, registers) * B (16 x 64).
template <class T, int kBMnMajor>
__device__ inline void multiply_64x64x16(float (&d)[32], const std::uint32_t (&a)[4],
                                         std::uint64_t b, int accumulate) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" WINNOW_REGISTERS_32
        "}, {%32, %33, %34, %35}, %36, p, 1, 1, %38;\n"
        "}\n"
        : WINNOW_OPERANDS_32(d)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(kBMnMajor));
  } else {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" WINNOW_REGISTERS_32
        "}, {%32, %33, %34, %35}, %36, p, 1, 1, %38;\n"
        "}\n"
        : WINNOW_OPERANDS_32(d)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(kBMnMajor));
  }
}

/// d (64 x 256) += A (64 x 16) * B (16 x 256), both in shared memory.
template <class T, int kAMnMajor, int kBMnMajor>
__device__ inline void multiply_64x256x16(float (&d)[128], std::uint64_t a, std::uint64_t b,
                                          int accumulate) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %130, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" WINNOW_REGISTERS_128
        "}, %128, %129, p, 1, 1, %131, %132;\n"
        "}\n"
        : WINNOW_OPERANDS_128(d)
        : "l"(a), "l"(b), "r"(accumulate), "n"(kAMnMajor), "n"(kBMnMajor));
  } else {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %130, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {" WINNOW_REGISTERS_128
        "}, %128, %129, p, 1, 1, %131, %132;\n"
        "}\n"
        : WINNOW_OPERANDS_128(d)
        : "l"(a), "l"(b), "r"(accumulate), "n"(kAMnMajor), "n"(kBMnMajor));
  }
}

/// d (64 x 256) += A (64 x 16, registers) * B (16 x 256).
template <class T, int kBMnMajor>
__device__ inline void multiply_64x256x16(float (&d)[128], const std::uint32_t (&a)[4],
                                          std::uint64_t b, int accumulate) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %133, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" WINNOW_REGISTERS_128
        "}, {%128, %129, %130, %131}, %132, p, 1, 1, %134;\n"
        "}\n"
        : WINNOW_OPERANDS_128(d)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(kBMnMajor));
  } else {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %133, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {" WINNOW_REGISTERS_128
        "}, {%128, %129, %130, %131}, %132, p, 1, 1, %134;\n"
        "}\n"
        : WINNOW_OPERANDS_128(d)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(kBMnMajor));
  }
}

/// d (64 x 256) += A * B^T over 32 bytes of k, both operands K-major in shared memory.
template <class T>
__device__ inline void multiply_64x256_k_major(float (&d)[128], std::uint64_t a, std::uint64_t b,
                                               int accumulate) {
  if constexpr (std::is_same_v<T, __nv_fp8_e4m3>) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %130, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k32.f32.e4m3.e4m3 {" WINNOW_REGISTERS_128
        "}, %128, %129, p, 1, 1;\n"
        "}\n"
        : WINNOW_OPERANDS_128(d)
        : "l"(a), "l"(b), "r"(accumulate));
  } else {
    multiply_64x256x16<T, 0, 0>(d, a, b, accumulate);
  }
}

}  // namespace winnow::hopper
