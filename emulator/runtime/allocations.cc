// SPDX-License-Identifier: Apache-2.0
// Memory of the device, at once and in the order of a stream.
#include <algorithm>
#include <cstring>
#include <map>
#include <memory>

#include "emulator/runtime/capture.h"
#include "emulator/runtime/device.h"
#include "emulator/runtime/errors.h"

namespace winnow::emulator {
namespace {

/// What cudaMallocAsync has allocated. Guarded by the device.
struct Pool {
  std::map<void*, std::size_t> blocks;
  std::size_t used = 0, most_used = 0;
};

Pool& pool() {
  static auto* const one = new Pool;
  return *one;
}

void* allocate_in_pool(const LockedGpu& gpu, std::size_t bytes) {
  void* const address = gpu->memory.allocate(bytes);
  pool().blocks[address] = bytes;
  pool().used += bytes;
  pool().most_used = std::max(pool().most_used, pool().used);
  return address;
}

/// Whether there was such an allocation.
bool free_anywhere(const LockedGpu& gpu, void* address) {
  if (const auto found = pool().blocks.find(address); found != pool().blocks.end()) {
    pool().used -= found->second;
    pool().blocks.erase(found);
  }
  return gpu->memory.free(address);
}

/// Memory of a graph, which has one address for all launches.
class GraphMemory {
 public:
  explicit GraphMemory(std::size_t bytes)
      : address_(LockedGpu()->memory.allocate(bytes)), bytes_(bytes) {}
  ~GraphMemory() { LockedGpu()->memory.free(address_); }
  GraphMemory(const GraphMemory&) = delete;
  GraphMemory& operator=(const GraphMemory&) = delete;

  void* address() const { return address_; }
  /// Nothing can be expected in it: each launch begins with other bytes.
  void spoil() const { std::memset(address_, 0xff, bytes_); }

 private:
  void* address_;
  std::size_t bytes_;
};

/// A captured one gives nothing back, since a graph keeps its memory.
void free_in_order(const std::shared_ptr<Stream>& stream, void* address) {
  require(LockedGpu()->memory.find(address).begin == address);
  if (is_capturing(stream))
    enqueue(stream, {});
  else
    enqueue(stream, {.run = [=] { free_anywhere(LockedGpu(), address); }});
}

}  // namespace
}  // namespace winnow::emulator

using namespace winnow::emulator;

cudaError_t cudaMalloc(void** address, std::size_t bytes) {
  return call([&] {
    refuse_while_capturing();
    require(address != nullptr);
    *address = bytes == 0 ? nullptr : LockedGpu()->memory.allocate(bytes);
  });
}

cudaError_t cudaFree(void* address) {
  return call([&] {
    refuse_while_capturing();
    wait_for_all_streams();
    require(address == nullptr || free_anywhere(LockedGpu(), address));
  });
}

cudaError_t cudaMallocAsync(void** address, std::size_t bytes, cudaStream_t handle) {
  return call([&] {
    require(address != nullptr);
    const std::shared_ptr<Stream> stream = find_stream(handle);
    if (bytes == 0) {
      *address = nullptr;
    } else if (is_capturing(stream)) {
      const auto memory = std::make_shared<const GraphMemory>(bytes);
      enqueue(stream, {.run = [=] { memory->spoil(); }});
      *address = memory->address();
    } else {
      *address = allocate_in_pool(LockedGpu(), bytes);
    }
  });
}

cudaError_t cudaFreeAsync(void* address, cudaStream_t stream) {
  return call([&] {
    if (address != nullptr) free_in_order(find_stream(stream), address);
  });
}

cudaError_t cudaMemGetInfo(std::size_t* left, std::size_t* all) {
  return call([&] {
    require(left != nullptr && all != nullptr);
    const LockedGpu gpu;
    *all = gpu->memory.capacity();
    *left = gpu->memory.capacity() - gpu->memory.used();
  });
}

cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* handle, int device) {
  return call([&] {
    require(handle != nullptr);
    require(device == 0, cudaErrorInvalidDevice);
    *handle = reinterpret_cast<cudaMemPool_t>(&pool());
  });
}

cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t /*pool*/, cudaMemPoolAttr attribute,
                                    void* value) {
  return call([&] {
    require(value != nullptr);
    require(attribute == cudaMemPoolAttrUsedMemHigh, cudaErrorNotSupported);
    const LockedGpu gpu;
    *static_cast<std::uint64_t*>(value) = pool().most_used;
  });
}

cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t /*pool*/, cudaMemPoolAttr attribute,
                                    void* value) {
  return call([&] {
    require(value != nullptr);
    require(attribute == cudaMemPoolAttrUsedMemHigh, cudaErrorNotSupported);
    const LockedGpu gpu;
    pool().most_used = pool().used;  // the largest use is forgotten, whatever the value
  });
}
