// SPDX-License-Identifier: Apache-2.0
// What is known of a kernel before it is launched, and what it is allowed.
#include <algorithm>

#include "emulator/runtime/device.h"
#include "emulator/runtime/errors.h"
#include "emulator/runtime/registry.h"

namespace winnow::emulator {
namespace {

constexpr int kRegisters = 64;  // of a thread; a guess, since PTX does not say

/// Blocks of a kernel that a multiprocessor has room for, by threads and shared memory.
int resident_blocks(const FunctionInfo& about, int threads, std::size_t dynamic_bytes) {
  const std::size_t bytes = kReservedSharedBytes + about.static_shared_bytes + dynamic_bytes;
  const int threads_of_warps = (threads + 31) / 32 * 32;
  return std::min({model().resident_blocks, model().resident_threads / threads_of_warps,
                   static_cast<int>(resident_shared_bytes() / bytes)});
}

}  // namespace
}  // namespace winnow::emulator

using namespace winnow::emulator;

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* handle) {
  return call([&] {
    require(attributes != nullptr);
    const Kernel& kernel = find_kernel(handle);
    const FunctionInfo& about = info(kernel.function());
    *attributes = {};
    attributes->sharedSizeBytes = about.static_shared_bytes;
    attributes->maxThreadsPerBlock = about.max_threads;
    attributes->numRegs = kRegisters;
    attributes->ptxVersion = kernel.binary->capability();
    attributes->binaryVersion = kernel.binary->capability();
    attributes->maxDynamicSharedSizeBytes = static_cast<int>(kernel.most_dynamic_bytes());
    attributes->preferredShmemCarveout = -1;
  });
}

cudaError_t cudaFuncSetAttribute(const void* handle, cudaFuncAttribute attribute, int value) {
  return call([&] {
    Kernel& kernel = find_kernel(handle);
    if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return;  // about time
    const std::size_t fixed = info(kernel.function()).static_shared_bytes;
    require(value >= 0 && static_cast<std::size_t>(value) + fixed <= model().shared_bytes);
    kernel.allowed_shared_bytes = static_cast<std::size_t>(value);
  });
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void* handle,
                                                                   int threads,
                                                                   std::size_t shared_bytes,
                                                                   unsigned /*flags*/) {
  return call([&] {
    require(blocks != nullptr && threads > 0);
    const FunctionInfo& about = info(find_kernel(handle).function());
    *blocks = threads > about.max_threads ? 0 : resident_blocks(about, threads, shared_bytes);
  });
}
