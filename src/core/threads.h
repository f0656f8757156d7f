// SPDX-License-Identifier: Apache-2.0
// parallel_for for the CPU backends: independent tasks, each with scratch memory of its lane.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include "winnow/execution.h"

namespace winnow {

/// Threads that a call uses: as asked, or all of the machine's.
int thread_count(const Execution& execution);

/// Hands out pieces of one block of memory, each aligned for vector loads.
class Scratch {
 public:
  static constexpr std::size_t kAlignment = 64;
  /// What `count` elements of T take of a Scratch; past 2^60 it stays there, so that sums of some
  /// such sizes are over every limit and do not wrap around.
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

/// Lanes that work at once: one a thread, as many as have scratch within the workspace limit, at
/// least one.
int lane_count(const Execution& execution, std::size_t scratch_bytes);

/// The caller's workspace, or `bytes` of host memory for the time of a call.
class HostWorkspace {
 public:
  HostWorkspace(const Execution& execution, std::size_t bytes);
  /// As given, with a workspace.
  const Execution& execution() const { return execution_; }

 private:
  struct Free {
    void operator()(std::byte* memory) const;
  };
  std::unique_ptr<std::byte, Free> memory_;
  Execution execution_;
};

/// Calls task(i, scratch) for i in [0, count), on as many lanes as have scratch_bytes each in
/// execution.workspace. The scratch is the lane's, with what an earlier task left in it. Tasks run
/// in any order; an exception of one ends the call.
void parallel_for(const Execution& execution, std::int64_t count, std::size_t scratch_bytes,
                  const std::function<void(std::int64_t, Scratch)>& task);

}  // namespace winnow
