// SPDX-License-Identifier: Apache-2.0
// cp.async.bulk: copies of contiguous bytes from shared memory to device memory, which the async
// proxy makes while the threads go on. Addresses and sizes are multiples of 16 bytes.
#pragma once

#include <cstdint>

#include "cuda/hopper/barrier.cuh"

namespace winnow::hopper {

/// Starts to copy bytes of shared memory to device memory.
__device__ inline void store_bulk(float* to, const float* shared, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
               "r"(shared_address(shared)), "r"(bytes)
               : "memory");
}

/// Starts to add floats of shared memory to those in device memory, each by an atomic.
__device__ inline void add_bulk(float* to, const float* shared, int bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
      "r"(shared_address(shared)), "r"(bytes)
      : "memory");
}

/// Makes a group of the copies that this thread has started.
__device__ inline void commit_bulk() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

/// Waits until all groups of this thread have read their shared memory, which may then change.
__device__ inline void wait_for_bulk_reads() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

}  // namespace winnow::hopper
