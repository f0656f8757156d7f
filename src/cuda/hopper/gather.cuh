// SPDX-License-Identifier: Apache-2.0
// cp.async: copies of 16 or 4 bytes from device memory to shared memory that bypass registers.
#pragma once

#include <cstdint>

namespace winnow::hopper {

/// Starts a copy; where `valid` is false it writes zeros and reads nothing. L2 fetches the line of
/// 128 bytes; pairs of lines would reach beyond rows of an odd number of them, such as 1152 bytes.
__device__ inline void copy_16_bytes(std::uint32_t shared_address, const void* source, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared_address),
               "l"(source), "r"(valid ? 16 : 0)
               : "memory");
}

/// The same of 4 bytes.
__device__ inline void copy_4_bytes(std::uint32_t shared_address, const void* source, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address), "l"(source),
               "r"(valid ? 4 : 0)
               : "memory");
}

/// Waits until all copies that this thread has started have landed.
__device__ inline void wait_for_own_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

}  // namespace winnow::hopper
