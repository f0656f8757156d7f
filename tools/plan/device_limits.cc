// SPDX-License-Identifier: Apache-2.0
// The limits of the machine's own memory.
#include "tools/plan/device_limits.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <thread>
#include <vector>

#include <unistd.h>

#include "tools/timing.h"

namespace winnow::plan {
namespace {

constexpr std::size_t kCopiedBytes = std::size_t{256} << 20;
constexpr int kRepeats = 5;

double copy_rate(int threads) {
  const std::vector<std::byte> from(kCopiedBytes);
  std::vector<std::byte> to(kCopiedBytes);
  const std::size_t share = kCopiedBytes / threads;
  const tools::Timing timing = tools::measure({}, kRepeats, [&] {
    std::vector<std::jthread> copies;
    for (int i = 0; i < threads; ++i)
      copies.emplace_back([&, i] { std::memcpy(&to[i * share], &from[i * share], share); });
  });
  return 2.0 * static_cast<double>(share * threads) / timing.median;
}

}  // namespace

DeviceLimits device_limits(Device device, int threads) {
  if (device.kind != DeviceKind::cpu) return cuda_device_limits(device.index);
  const auto pages = static_cast<double>(sysconf(_SC_PHYS_PAGES));
  return {.memory_bytes = pages * static_cast<double>(sysconf(_SC_PAGE_SIZE)),
          .cache_bytes = std::max(0.0, static_cast<double>(sysconf(_SC_LEVEL3_CACHE_SIZE))),
          .copy_rate = copy_rate(threads)};
}

}  // namespace winnow::plan
