// SPDX-License-Identifier: Apache-2.0
// Barriers in shared memory by which warps hand buffers to each other.
#pragma once

#include <cstdint>

namespace winnow::hopper {

__device__ inline std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

/// Completes a phase when `arrivals` have come. Phases are numbered from 0; what was written before
/// an arrival is seen after the wait.
struct Barrier {
  std::uint64_t state;

  __device__ void init(int arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(&state)), "r"(arrivals)
                 : "memory");
  }
  __device__ void arrive() {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(&state)) : "memory");
  }
  /// Holds the phase until the copy engine has brought that many bytes.
  __device__ void expect(int bytes) {
    asm volatile(
        "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&state)),
        "r"(bytes)
        : "memory");
  }
  /// Arrives, and expects that many bytes.
  __device__ void arrive_and_expect(int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(&state)),
                 "r"(bytes)
                 : "memory");
  }
  /// Arrives by itself once all copies that this thread has started have landed.
  __device__ void arrive_after_copies() {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(&state))
                 : "memory");
  }
  /// Waits for the end of phase `phase`. Phase -1 has always ended.
  __device__ void wait(int phase) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
        "@done bra end;\n"
        "bra again;\n"
        "end:\n"
        "}\n" ::"r"(shared_address(&state)),
        "r"(phase & 1)
        : "memory");
  }
};

/// Makes initialised barriers known to copies that arrive by themselves.
__device__ inline void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

/// All `kThreads` threads of the warps that name this barrier.
template <int kName, int kThreads>
__device__ inline void sync_warps() {
  asm volatile("bar.sync %0, %1;" ::"n"(kName), "n"(kThreads) : "memory");
}

/// Counts for sync_warps without waiting.
template <int kName, int kThreads>
__device__ inline void arrive_warps() {
  asm volatile("bar.arrive %0, %1;" ::"n"(kName), "n"(kThreads) : "memory");
}

}  // namespace winnow::hopper
