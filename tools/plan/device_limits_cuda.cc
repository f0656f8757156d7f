// SPDX-License-Identifier: Apache-2.0
// The limits of a CUDA device's memory.
#include <cstddef>
#include <memory>
#include <string>

#include <cuda_runtime_api.h>

#include "harness/device_memory.h"
#include "tools/plan/device_limits.h"
#include "tools/timing.h"
#include "winnow/error.h"

namespace winnow::plan {
namespace {

constexpr std::size_t kCopiedBytes = std::size_t{1} << 30;
constexpr int kRepeats = 9;

void check(cudaError_t result) {
  if (result == cudaSuccess) return;
  throw Error(ErrorCode::device, std::string("CUDA: ") + cudaGetErrorString(result));
}

double copy_rate(std::int32_t device) {
  const auto allocate = [&] {
    const auto free = [device](void* memory) { harness::free_on_cuda(device, memory); };
    return std::shared_ptr<void>(harness::allocate_on_cuda(device, kCopiedBytes), free);
  };
  const std::shared_ptr<void> from = allocate();
  const std::shared_ptr<void> to = allocate();
  const tools::Timing timing = tools::measure({DeviceKind::cuda, device}, kRepeats, [&] {
    check(cudaMemcpyAsync(to.get(), from.get(), kCopiedBytes, cudaMemcpyDeviceToDevice, nullptr));
  });
  return 2.0 * kCopiedBytes / timing.median;
}

}  // namespace

DeviceLimits cuda_device_limits(std::int32_t device) {
  std::size_t free_bytes = 0;
  std::size_t memory_bytes = 0;
  int cache_bytes = 0;
  check(cudaSetDevice(device));
  check(cudaMemGetInfo(&free_bytes, &memory_bytes));
  check(cudaDeviceGetAttribute(&cache_bytes, cudaDevAttrL2CacheSize, device));
  return {.memory_bytes = static_cast<double>(memory_bytes),
          .cache_bytes = static_cast<double>(cache_bytes),
          .copy_rate = copy_rate(device)};
}

}  // namespace winnow::plan
