// SPDX-License-Identifier: Apache-2.0
// The kernels of host code, and what nvcc's generated code calls to register them.
#include "emulator/runtime/registry.h"

#include <algorithm>
#include <map>
#include <set>

#include "emulator/runtime/device.h"
#include "emulator/runtime/errors.h"

namespace winnow::emulator {
namespace {

/// For ever: objects in constructors and after the end of main use it.
struct Registry {
  std::mutex mutex;
  std::map<const void*, Kernel*> kernels;
  std::set<const void*> handles;  // of kernels
};

Registry& registry() {
  static auto* const one = new Registry;
  return *one;
}

Binary* binary_of(void** handle) { return reinterpret_cast<Binary*>(handle); }

}  // namespace

std::size_t Kernel::most_dynamic_bytes() const {
  if (allowed_shared_bytes > 0) return allowed_shared_bytes;
  const std::size_t fixed = info(function()).static_shared_bytes;
  return kSharedBytesNotOptedIn - std::min(kSharedBytesNotOptedIn, fixed);
}

Kernel& find_kernel(const void* handle) {
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  if (const auto found = all.kernels.find(handle); found != all.kernels.end())
    return *found->second;
  require(all.handles.contains(handle), cudaErrorInvalidDeviceFunction);
  return *static_cast<Kernel*>(const_cast<void*>(handle));
}

}  // namespace winnow::emulator

// ---- What nvcc's generated host code calls before main, and at the end.

using namespace winnow::emulator;

extern "C" {

void** __cudaRegisterFatBinary(void* wrapper) {
  return reinterpret_cast<void**>(new Binary(wrapper));
}

void __cudaRegisterFatBinaryEnd(void** /*handle*/) {}

void __cudaRegisterFunction(void** handle, const char* stub, char* /*function*/, const char* name,
                            int /*thread_limit*/, uint3* /*tid*/, uint3* /*bid*/, dim3* /*block*/,
                            dim3* /*grid*/, int* /*warp_size*/) {
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  auto* const kernel = new Kernel;
  kernel->binary = binary_of(handle);
  kernel->name = name;
  all.handles.insert(kernel);
  all.kernels[stub] = kernel;
}

/// Host code reaches no variable of the device.
void __cudaRegisterVar(void** /*handle*/, char* /*shadow*/, char* /*address*/, const char* /*name*/,
                       int /*external*/, std::size_t /*bytes*/, int /*constant*/, int /*global*/) {}

/// Nothing is destroyed: work that has been enqueued may still use it.
void __cudaUnregisterFatBinary(void** handle) {
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  std::erase_if(all.kernels,
                [&](const auto& each) { return each.second->binary == binary_of(handle); });
}

char __cudaInitModule(void** /*handle*/) { return 0; }
}
