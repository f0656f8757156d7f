// SPDX-License-Identifier: Apache-2.0
// Copies of 16 bytes from device memory to shared memory that do not pass through registers.
#pragma once

#include <cstdint>

namespace winnow::hopper {

/// Zeros instead where `valid` is false; then nothing is read.
__device__ inline void copy_16_bytes(std::uint32_t shared_address, const void* source, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(shared_address),
               "l"(source), "r"(valid ? 16 : 0)
               : "memory");
}

/// Until all copies that this thread has started have landed.
__device__ inline void wait_for_own_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

}  // namespace winnow::hopper
