// SPDX-License-Identifier: Apache-2.0
// parallel_for for the CPU backends. Independent tasks are spread over lanes; a lane is a worker
// with scratch memory of its own, so that tasks allocate nothing.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include "winnow/execution.h"

namespace winnow {

/// Number of threads that a call uses: execution.threads, or by default all of the machine.
int thread_count(const Execution& execution);

/// A bump allocator over one block of memory; what it hands out is aligned for vector loads.
class Scratch {
 public:
  static constexpr std::size_t kAlignment = 64;
  /// Bytes that `count` elements of T occupy in a Scratch. Saturates at 2^60, so that sums of such
  /// sizes exceed every limit instead of wrapping around.
  template <class T>
  static constexpr std::size_t bytes(std::int64_t count) {
    constexpr std::size_t kMost = std::size_t{1} << 60;
    const std::size_t raw =
        std::min(static_cast<std::size_t>(count), kMost / sizeof(T)) * sizeof(T);
    return (raw + kAlignment - 1) / kAlignment * kAlignment;
  }

  Scratch(std::byte* memory, std::size_t size) : next_(memory), left_(size) {}
  template <class T>
  std::span<T> take(std::int64_t count) {
    return {reinterpret_cast<T*>(take_bytes(bytes<T>(count))), static_cast<std::size_t>(count)};
  }

 private:
  std::byte* take_bytes(std::size_t size);
  std::byte* next_;
  std::size_t left_;
};

/// Number of lanes that run at once: one per thread, but no more than have their scratch within the
/// workspace limit, and at least one.
int lane_count(const Execution& execution, std::size_t scratch_bytes);
/// The scratch of all those lanes together, in bytes.
inline std::size_t all_lanes_bytes(const Execution& execution, std::size_t scratch_bytes) {
  return scratch_bytes * static_cast<std::size_t>(lane_count(execution, scratch_bytes));
}

/// The caller's workspace, or, without one, `bytes` of host memory allocated for one call.
class HostWorkspace {
 public:
  HostWorkspace(const Execution& execution, std::size_t bytes);
  /// The given Execution, with a workspace set.
  const Execution& execution() const { return execution_; }

 private:
  struct Free {
    void operator()(std::byte* memory) const;
  };
  std::unique_ptr<std::byte, Free> memory_;
  Execution execution_;
};

/// Calls task(i, scratch) for i in [0, count), on as many lanes as execution.workspace has room for
/// at scratch_bytes each. Tasks run in any order. The scratch belongs to the lane and is not
/// initialised: it holds what an earlier task left. An exception in a task ends the call.
void parallel_for(const Execution& execution, std::int64_t count, std::size_t scratch_bytes,
                  const std::function<void(std::int64_t, Scratch)>& task);

}  // namespace winnow
