// SPDX-License-Identifier: Apache-2.0
// The instructions of tensor cores that only the indexer's gradients use. The layouts of operands
// and accumulators are those of hopper/wgmma.cuh.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/hopper/wgmma.cuh"

namespace winnow::cuda::gradient_sm90 {

/// d (64 x 32) += A (64 x 16) * B (32 x 16, K-major)^T, both in shared memory. A is K-major, or
/// MN-major where the template argument is 1.
template <class T, int kAMnMajor>
__device__ inline void multiply_64x32x16(float (&d)[16], std::uint64_t a, std::uint64_t b,
                                         int accumulate) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %18, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, "
        "%8, %9, %10, %11, %12, %13, %14, %15}, %16, %17, p, 1, 1, %19, 0;\n"
        "}\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
          "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
          "+f"(d[14]), "+f"(d[15])
        : "l"(a), "l"(b), "r"(accumulate), "n"(kAMnMajor));
  } else {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %18, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7, "
        "%8, %9, %10, %11, %12, %13, %14, %15}, %16, %17, p, 1, 1, %19, 0;\n"
        "}\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
          "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
          "+f"(d[14]), "+f"(d[15])
        : "l"(a), "l"(b), "r"(accumulate), "n"(kAMnMajor));
  }
}

/// d (64 x heads) += A * B^T with as many heads as d has room for.
template <class T, int kAMnMajor, int kAccumulators>
__device__ inline void multiply_by_heads(float (&d)[kAccumulators], std::uint64_t a,
                                         std::uint64_t b, int accumulate) {
  if constexpr (kAccumulators == 16) {
    multiply_64x32x16<T, kAMnMajor>(d, a, b, accumulate);
  } else {
    hopper::multiply_64x64x16<T, kAMnMajor, 0>(d, a, b, accumulate);
  }
}

}  // namespace winnow::cuda::gradient_sm90
