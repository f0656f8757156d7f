// SPDX-License-Identifier: Apache-2.0
// Streams: work in order. Work runs at the call that enqueues it where nothing is to be waited for,
// else on a thread of the stream.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include <cuda_runtime_api.h>

namespace winnow::emulator {

struct Capture;

/// Whether work that was enqueued has been done.
struct Completion {
  bool done = false;
  std::chrono::steady_clock::time_point time;  // when it was
};
using Ticket = std::shared_ptr<const Completion>;

struct Task {
  std::function<void()> work;  // may be empty
  std::vector<Ticket> waits;
  std::shared_ptr<Completion> completion;
};

/// Guarded by the mutex of all streams, which no work holds.
struct Stream {
  bool legacy = false;
  bool blocking = true;  // the legacy stream and this one wait for each other

  std::deque<Task> tasks;   // not begun
  bool running = false;     // a task
  bool has_thread = false;  // which ends when there are no tasks
  Ticket last;              // of the task enqueued last; null if there was none

  std::shared_ptr<Capture> capture;  // null if there is none
};

/// The mutex of all streams, captures and events.
std::mutex& streams_mutex();

/// The stream of a handle; the handle of a destroyed one is refused.
std::shared_ptr<Stream> find_stream(cudaStream_t handle);

enum class At { once, later };  // later: on the stream's thread
/// Enqueues work, which throws nothing.
Ticket submit(const std::shared_ptr<Stream>& stream, std::function<void()> work, At at = At::once);

bool is_done(const Ticket& ticket);
void wait_for(const Ticket& ticket);
void wait_for_all_streams();

/// The work that a stream's next task would come after; the mutex is held.
std::vector<Ticket> tickets_before(const Stream& stream);

cudaStream_t make_stream(unsigned flags);
/// Its work is still done.
void forget_stream(cudaStream_t handle);
/// Calls `visit` with each stream; the mutex is held.
void for_each_stream(const std::function<void(Stream&)>& visit);

}  // namespace winnow::emulator
