// SPDX-License-Identifier: Apache-2.0
// The one device, and what it says of itself.
#include <algorithm>
#include <string>

#include "emulator/runtime/device.h"
#include "emulator/runtime/errors.h"

namespace winnow::emulator {
namespace {

constexpr int kRegisters = 65536;     // of a multiprocessor, and of a block
constexpr int kCacheBytes = 4 << 20;  // a small one: benchmarks write over all of it

/// What winnow, its tests, its benchmarks and CUB ask for; anything else is refused.
int attribute_of(cudaDeviceAttr which) {
  switch (which) {
    case cudaDevAttrComputeCapabilityMajor:
      return model().major;
    case cudaDevAttrComputeCapabilityMinor:
      return model().minor;
    case cudaDevAttrMultiProcessorCount:
      return Gpu::kMultiprocessors;
    case cudaDevAttrMaxGridDimX:
      return kMostBlocksAlong[0];
    case cudaDevAttrMaxSharedMemoryPerBlock:
      return kSharedBytesNotOptedIn;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      return static_cast<int>(model().shared_bytes);
    case cudaDevAttrUnifiedAddressing:
      return 1;
    case cudaDevAttrL2CacheSize:
      return kCacheBytes;
    default:
      fail(cudaErrorInvalidValue);
  }
}

void require_device(int device) { require(device == 0, cudaErrorInvalidDevice); }

}  // namespace
}  // namespace winnow::emulator

using namespace winnow::emulator;

cudaError_t cudaGetDeviceCount(int* count) {
  return call([&] {
    require(count != nullptr);
    *count = 1;
  });
}

cudaError_t cudaGetDevice(int* device) {
  return call([&] {
    require(device != nullptr);
    *device = 0;
  });
}

cudaError_t cudaSetDevice(int device) {
  return call([&] { require_device(device); });
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  return call([&] {
    require(value != nullptr);
    require_device(device);
    *value = attribute_of(attribute);
  });
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  return call([&] {
    require(properties != nullptr);
    require_device(device);
    *properties = {};
    const std::string name = "emulated GPU (" + std::string(model().name) + ")";
    std::ranges::copy(name, properties->name);
    properties->major = model().major;
    properties->minor = model().minor;
    properties->totalGlobalMem = LockedGpu()->memory.capacity();
    properties->multiProcessorCount = Gpu::kMultiprocessors;
    properties->warpSize = 32;
    properties->maxThreadsPerBlock = kMostThreads;
    properties->maxThreadsPerMultiProcessor = model().resident_threads;
    properties->maxBlocksPerMultiProcessor = model().resident_blocks;
    std::ranges::copy(kMostThreadsAlong, properties->maxThreadsDim);
    std::ranges::copy(kMostBlocksAlong, properties->maxGridSize);
    properties->sharedMemPerBlock = kSharedBytesNotOptedIn;
    properties->sharedMemPerBlockOptin = model().shared_bytes;
    properties->sharedMemPerMultiprocessor = resident_shared_bytes();
    properties->reservedSharedMemPerBlock = kReservedSharedBytes;
    properties->regsPerBlock = kRegisters;
    properties->regsPerMultiprocessor = kRegisters;
    properties->totalConstMem = 64 * 1024;
    properties->l2CacheSize = kCacheBytes;
    properties->unifiedAddressing = 1;
    properties->concurrentKernels = 1;
    properties->asyncEngineCount = 1;
    properties->memoryPoolsSupported = 1;
    properties->canMapHostMemory = 1;
    properties->clusterLaunch = model().major >= 9 ? 1 : 0;
  });
}
