// SPDX-License-Identifier: Apache-2.0
// DeviceLimits: what the memory of a device holds, and how fast it is.
#pragma once

#include <cstdint>

#include "winnow/tensor.h"

namespace winnow::plan {

struct DeviceLimits {
  double memory_bytes;
  double cache_bytes;  // of the last cache before memory; 0 where the system does not tell
  double copy_rate;    // bytes that a plain copy reads and writes per second
};

/// Measures the copy; on the CPU it runs on so many threads.
DeviceLimits device_limits(Device device, int threads);

/// The same for a CUDA device; a build without CUDA refuses.
DeviceLimits cuda_device_limits(std::int32_t device);

}  // namespace winnow::plan
