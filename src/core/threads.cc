// SPDX-License-Identifier: Apache-2.0
#include "core/threads.h"

#include <algorithm>
#include <atomic>
#include <cassert>
#include <new>

#include <fmt/format.h>
#include <oneapi/tbb/info.h>
#include <oneapi/tbb/parallel_for.h>
#include <oneapi/tbb/partitioner.h>
#include <oneapi/tbb/task_arena.h>

#include "core/refusals.h"
#include "winnow/error.h"

namespace winnow {
namespace {

/// A place where so many threads work on one call at a time. oneTBB frees the memory of an arena
/// only when one of its workers comes by, which may be never, so that an arena is kept and serves
/// one call after another.
struct Arena {
  explicit Arena(int threads) : threads(threads), tbb(threads) {}

  const int threads;
  oneapi::tbb::task_arena tbb;
  std::atomic<bool> is_taken = true;
  Arena* next = nullptr;
};

/// Arenas are added and never removed: at most as many for a number of threads as there were calls
/// with it at the same time. No lock, since a process may be forked while another thread holds it.
std::atomic<Arena*> all_arenas = nullptr;

/// An arena for the time of a call.
class TakenArena {
 public:
  explicit TakenArena(int threads) : arena_(find(threads)) {
    if (arena_ == nullptr) arena_ = add(threads);
  }
  ~TakenArena() { arena_->is_taken.store(false, std::memory_order_release); }
  TakenArena(const TakenArena&) = delete;
  TakenArena& operator=(const TakenArena&) = delete;
  oneapi::tbb::task_arena& get() const { return arena_->tbb; }

 private:
  /// Null if no arena is free.
  static Arena* find(int threads) {
    Arena* arena = all_arenas.load(std::memory_order_acquire);
    while (arena != nullptr && (arena->threads != threads ||
                                arena->is_taken.exchange(true, std::memory_order_acquire))) {
      arena = arena->next;
    }
    return arena;
  }
  static Arena* add(int threads) {
    auto* const arena = new Arena(threads);
    arena->next = all_arenas.load(std::memory_order_relaxed);
    while (!all_arenas.compare_exchange_weak(arena->next, arena, std::memory_order_release,
                                             std::memory_order_relaxed)) {
    }
    return arena;
  }

  Arena* arena_;
};

}  // namespace

int thread_count(const Execution& execution) {
  return execution.threads > 0 ? execution.threads : oneapi::tbb::info::default_concurrency();
}

std::byte* Scratch::take_bytes(std::size_t size) {
  assert(size <= left_);
  std::byte* const taken = next_;
  next_ += size;
  left_ -= size;
  return taken;
}

int lane_count(const Execution& execution, std::size_t scratch_bytes) {
  const auto threads = static_cast<std::size_t>(thread_count(execution));
  const std::size_t fitting = execution.workspace_limit / std::max<std::size_t>(scratch_bytes, 1);
  return static_cast<int>(std::clamp<std::size_t>(fitting, 1, threads));
}

void HostWorkspace::Free::operator()(std::byte* memory) const {
  ::operator delete (memory, std::align_val_t{Scratch::kAlignment});
}

HostWorkspace::HostWorkspace(const Execution& execution, std::size_t bytes)
    : execution_(execution) {
  if (execution.workspace != nullptr || bytes == 0) return;
  try {
    memory_.reset(
        static_cast<std::byte*>(::operator new (bytes, std::align_val_t{Scratch::kAlignment})));
  } catch (const std::bad_alloc&) {
    throw Error(ErrorCode::out_of_memory, fmt::format(refusal::no_workspace, bytes));
  }
  execution_.workspace = memory_.get();
  execution_.workspace_bytes = bytes;
}

void parallel_for(const Execution& execution, std::int64_t count, std::size_t scratch_bytes,
                  const std::function<void(std::int64_t, Scratch)>& task) {
  auto* const memory = static_cast<std::byte*>(execution.workspace);
  auto lanes = static_cast<std::size_t>(thread_count(execution));
  if (scratch_bytes > 0) lanes = std::min(lanes, execution.workspace_bytes / scratch_bytes);
  lanes = std::min(lanes, static_cast<std::size_t>(std::max<std::int64_t>(count, 1)));
  assert(lanes > 0);

  std::atomic<std::int64_t> next{0};
  const auto run_lane = [&](std::size_t lane) {
    std::byte* const begin = scratch_bytes > 0 ? memory + scratch_bytes * lane : nullptr;
    for (std::int64_t i = next++; i < count; i = next++) task(i, Scratch(begin, scratch_bytes));
  };
  // Capped, since oneTBB prints a warning if an arena asks for more threads than the machine has.
  const int threads = std::min(static_cast<int>(lanes), oneapi::tbb::info::default_concurrency());
  if (threads == 1) return run_lane(0);
  const TakenArena arena(threads);
  arena.get().execute([&] {
    oneapi::tbb::parallel_for(std::size_t{0}, lanes, run_lane, oneapi::tbb::simple_partitioner());
  });
}

}  // namespace winnow
