// SPDX-License-Identifier: Apache-2.0
// stmatrix: fragments of accumulators to shared memory, 8 x 8 matrices of two-byte elements.
#pragma once

#include <cstdint>

namespace winnow::hopper {

/// Stores four 8 x 8 matrices of two-byte elements, each transposed: lane 8i + j gives the address
/// of the 16 bytes that column j of matrix i fills. Of matrix i, lane 4g + c holds columns 2c and
/// 2c + 1 of row g in words[i].
__device__ inline void store_transposed(std::uint32_t shared_address,
                                        const std::uint32_t (&words)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                   shared_address),
               "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
}

/// Stores four 8 x 8 matrices likewise, but each as it is: lane 8i + j gives the address of row j
/// of matrix i.
__device__ inline void store_matrices(std::uint32_t shared_address,
                                      const std::uint32_t (&words)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address),
      "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
      : "memory");
}

}  // namespace winnow::hopper
