// SPDX-License-Identifier: Apache-2.0
// Launches of kernels: checked as the runtime checks them, with a copy of the parameters.
#pragma once

#include <array>
#include <cstddef>

#include <cuda_runtime_api.h>

#include "emulator/runtime/graph.h"

namespace winnow::emulator {

struct LaunchShape {
  dim3 grid;
  dim3 block;
  std::size_t shared_bytes = 0;
  std::array<unsigned, 3> cluster{};  // zeros: what the kernel asks for
};

/// `handle` as for find_kernel; `parameters` has the address of each.
Action kernel_action(const void* handle, const LaunchShape& shape, void* const* parameters);

}  // namespace winnow::emulator
