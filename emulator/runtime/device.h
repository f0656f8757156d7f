// SPDX-License-Identifier: Apache-2.0
// The device, of which one thread at a time makes use, and the limits that all models share.
#pragma once

#include <cstddef>
#include <mutex>

#include "emulator/gpu.h"
#include "emulator/model.h"

namespace winnow::emulator {

inline constexpr int kMostThreads = 1024;  // of a block
inline constexpr int kMostThreadsAlong[] = {1024, 1024, 64};
inline constexpr int kMostBlocksAlong[] = {2147483647, 65535, 65535};  // of a grid
inline constexpr int kMostBlocksOfCluster = 8;

inline constexpr std::size_t kReservedSharedBytes = 1024;         // of each block
inline constexpr std::size_t kSharedBytesNotOptedIn = 48 * 1024;  // of a block
/// Of a multiprocessor: room for one block that has all it can.
inline std::size_t resident_shared_bytes() { return model().shared_bytes + kReservedSharedBytes; }

/// Held while memory is allocated or looked up, modules are read and kernels run.
class LockedGpu {
 public:
  LockedGpu() : lock_(mutex()) {}
  Gpu* operator->() const { return &Gpu::instance(); }

 private:
  static std::mutex& mutex() {
    static auto* const one = new std::mutex;  // for ever: streams may outlive static objects
    return *one;
  }
  std::lock_guard<std::mutex> lock_;
};

}  // namespace winnow::emulator
