// SPDX-License-Identifier: Apache-2.0
// mbarriers: barriers in shared memory by which warps hand buffers to each other.
#pragma once

#include <cstdint>

namespace winnow::hopper {

__device__ inline std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

/// An mbarrier. A phase completes when `arrivals` threads have arrived; phases are numbered from 0.
/// Writes before an arrival are visible after the wait.
struct Barrier {
  std::uint64_t state;

  __device__ void init(int arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(&state)), "r"(arrivals)
                 : "memory");
  }
  __device__ void arrive() {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(&state)) : "memory");
  }
  /// Arrives for so many threads.
  __device__ void arrive(int threads) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0], %1;" ::"r"(shared_address(&state)),
                 "r"(threads)
                 : "memory");
  }
  /// Keeps the phase open until TMA has written that many bytes.
  __device__ void expect(int bytes) {
    asm volatile(
        "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&state)),
        "r"(bytes)
        : "memory");
  }
  /// Arrives, and keeps the phase open until TMA has written that many bytes.
  __device__ void arrive_and_expect(int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(&state)),
                 "r"(bytes)
                 : "memory");
  }
  /// Makes the barrier get this thread's arrival once all its cp.async copies have landed.
  __device__ void arrive_after_copies() {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(&state))
                 : "memory");
  }
  /// Waits until phase `phase` has completed. Phase -1 counts as completed.
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

/// Makes initialised barriers visible to the async proxy, which completes copies.
__device__ inline void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

/// The proxy fence: makes ordinary writes to shared memory, this thread's and those it has waited
/// for, visible to later products, which read through the async proxy.
__device__ inline void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/// Orders this thread's loads from shared memory before what TMA writes there after its next
/// arrival. The arrival alone does not wait for them, and they may queue for longer than TMA takes.
__device__ inline void wait_for_own_loads() { fence_proxy_async(); }

/// Waits at named barrier `kName` for `kThreads` threads.
template <int kName, int kThreads>
__device__ inline void sync_warps() {
  asm volatile("bar.sync %0, %1;" ::"n"(kName), "n"(kThreads) : "memory");
}

/// Arrives at named barrier `kName` without waiting.
template <int kName, int kThreads>
__device__ inline void arrive_warps() {
  asm volatile("bar.arrive %0, %1;" ::"n"(kName), "n"(kThreads) : "memory");
}

}  // namespace winnow::hopper
