// SPDX-License-Identifier: Apache-2.0
// Runs the work of streams in order.
#include "emulator/runtime/stream.h"

#include <algorithm>
#include <map>
#include <thread>
#include <utility>

#include "emulator/runtime/errors.h"

namespace winnow::emulator {
namespace {

/// Of a stream that has been destroyed.
struct Forgotten {
  Ticket last;
  bool blocking;
};

/// For ever: threads of streams may run when the process ends.
struct Streams {
  std::mutex mutex;
  std::condition_variable changed;
  std::shared_ptr<Stream> legacy = std::make_shared<Stream>();
  std::map<Stream*, std::shared_ptr<Stream>> live;
  std::vector<Forgotten> forgotten;

  Streams() { legacy->legacy = true; }
};

Streams& streams() {
  static auto* const one = new Streams;
  return *one;
}

bool all_done(const std::vector<Ticket>& tickets) {
  return std::ranges::all_of(tickets, [](const Ticket& each) { return each->done; });
}

/// Runs a task, unlocked meanwhile.
void run(std::unique_lock<std::mutex>& lock, Stream& stream, Task& task) {
  stream.running = true;
  lock.unlock();
  if (task.work && broken() == cudaSuccess) task.work();
  task.work = nullptr;  // what it holds ends unlocked too
  lock.lock();
  stream.running = false;
  task.completion->time = std::chrono::steady_clock::now();
  task.completion->done = true;
  streams().changed.notify_all();
}

void run_tasks(const std::shared_ptr<Stream>& stream) {
  std::unique_lock lock(streams().mutex);
  while (!stream->tasks.empty()) {
    streams().changed.wait(
        lock, [&] { return !stream->running && all_done(stream->tasks.front().waits); });
    Task task = std::move(stream->tasks.front());
    stream->tasks.pop_front();
    run(lock, *stream, task);
  }
  stream->has_thread = false;
}

}  // namespace

std::mutex& streams_mutex() { return streams().mutex; }

std::shared_ptr<Stream> find_stream(cudaStream_t handle) {
  if (handle == nullptr || handle == cudaStreamLegacy) return streams().legacy;
  const std::lock_guard lock(streams().mutex);
  const auto found = streams().live.find(reinterpret_cast<Stream*>(handle));
  require(found != streams().live.end(), cudaErrorInvalidResourceHandle);
  return found->second;
}

std::vector<Ticket> tickets_before(const Stream& stream) {
  std::vector<Ticket> tickets;
  if (stream.last != nullptr) tickets.push_back(stream.last);
  if (stream.legacy) {
    for (const auto& [handle, other] : streams().live)
      if (other->blocking && other->last != nullptr) tickets.push_back(other->last);
    for (const Forgotten& other : streams().forgotten)
      if (other.blocking) tickets.push_back(other.last);
  } else if (stream.blocking && streams().legacy->last != nullptr) {
    tickets.push_back(streams().legacy->last);
  }
  return tickets;
}

Ticket submit(const std::shared_ptr<Stream>& stream, std::function<void()> work, At at) {
  std::unique_lock lock(streams().mutex);
  Task task{.work = std::move(work),
            .waits = tickets_before(*stream),
            .completion = std::make_shared<Completion>()};
  Ticket ticket = task.completion;
  const bool now =
      at == At::once && stream->tasks.empty() && !stream->running && all_done(task.waits);
  stream->last = ticket;
  if (now) {
    run(lock, *stream, task);
  } else {
    stream->tasks.push_back(std::move(task));
    if (!std::exchange(stream->has_thread, true)) std::thread(run_tasks, stream).detach();
  }
  return ticket;
}

bool is_done(const Ticket& ticket) {
  const std::lock_guard lock(streams().mutex);
  return ticket == nullptr || ticket->done;
}

void wait_for(const Ticket& ticket) {
  std::unique_lock lock(streams().mutex);
  streams().changed.wait(lock, [&] { return ticket == nullptr || ticket->done; });
}

void wait_for_all_streams() {
  Streams& all = streams();
  std::unique_lock lock(all.mutex);
  std::vector<Ticket> tickets;
  for (const Forgotten& stream : all.forgotten) tickets.push_back(stream.last);
  for (const auto& [handle, stream] : all.live)
    if (stream->last != nullptr) tickets.push_back(stream->last);
  if (all.legacy->last != nullptr) tickets.push_back(all.legacy->last);
  all.changed.wait(lock, [&] { return all_done(tickets); });
}

cudaStream_t make_stream(unsigned flags) {
  require((flags & ~unsigned{cudaStreamNonBlocking}) == 0);
  const auto stream = std::make_shared<Stream>();
  stream->blocking = (flags & cudaStreamNonBlocking) == 0;
  const std::lock_guard lock(streams().mutex);
  streams().live[stream.get()] = stream;
  return reinterpret_cast<cudaStream_t>(stream.get());
}

void forget_stream(cudaStream_t handle) {
  Streams& all = streams();
  const std::lock_guard lock(all.mutex);
  const auto found = all.live.find(reinterpret_cast<Stream*>(handle));
  require(found != all.live.end(), cudaErrorInvalidResourceHandle);
  std::erase_if(all.forgotten, [](const Forgotten& each) { return each.last->done; });
  if (found->second->last != nullptr)
    all.forgotten.push_back({found->second->last, found->second->blocking});
  all.live.erase(found);
}

void for_each_stream(const std::function<void(Stream&)>& visit) {
  for (const auto& [handle, stream] : streams().live) visit(*stream);
}

}  // namespace winnow::emulator
