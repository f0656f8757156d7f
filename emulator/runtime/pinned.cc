// SPDX-License-Identifier: Apache-2.0
// Memory of the host that kernels may touch.
#include <cstdlib>
#include <set>

#include "emulator/runtime/capture.h"
#include "emulator/runtime/device.h"
#include "emulator/runtime/errors.h"

namespace winnow::emulator {
namespace {

/// Guarded by the device.
std::set<void*>& pinned() {
  static auto* const all = new std::set<void*>;
  return *all;
}

void* allocate_pinned(std::size_t bytes) {
  constexpr std::size_t kAlignment = 4096;
  void* const address =
      std::aligned_alloc(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment);
  if (address == nullptr) throw std::bad_alloc();
  const LockedGpu gpu;
  gpu->memory.add(address, bytes);
  pinned().insert(address);
  return address;
}

void release(void* address) {
  wait_for_all_streams();
  const LockedGpu gpu;
  require(pinned().erase(address) > 0);
  gpu->memory.remove(address);
  std::free(address);
}

}  // namespace
}  // namespace winnow::emulator

using namespace winnow::emulator;

cudaError_t cudaMallocHost(void** address, std::size_t bytes) {
  return call([&] {
    refuse_while_capturing();
    require(address != nullptr);
    *address = bytes == 0 ? nullptr : allocate_pinned(bytes);
  });
}

cudaError_t cudaFreeHost(void* address) {
  return call([&] {
    refuse_while_capturing();
    if (address != nullptr) release(address);
  });
}
