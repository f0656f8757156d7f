// SPDX-License-Identifier: Apache-2.0
// Events: places in the order of a stream's work.
#include <mutex>
#include <set>

#include "emulator/runtime/capture.h"
#include "emulator/runtime/errors.h"
#include "emulator/runtime/stream.h"

namespace winnow::emulator {
namespace {

/// Guarded by the mutex of all streams.
struct Event {
  bool timed = true;
  Ticket recorded;        // null if it was not
  bool captured = false;  // it was last recorded in a stream that captured
};

/// Guarded by the mutex of all streams.
std::set<Event*>& live_events() {
  static auto* const one = new std::set<Event*>;
  return *one;
}

/// The mutex of all streams is held.
Event& event_of(cudaEvent_t handle) {
  auto* const event = reinterpret_cast<Event*>(handle);
  require(live_events().contains(event), cudaErrorInvalidResourceHandle);
  return *event;
}

/// What is to be waited for.
Ticket recorded(cudaEvent_t handle) {
  const std::lock_guard lock(streams_mutex());
  const Event& event = event_of(handle);
  require(!event.captured, cudaErrorCapturedEvent);
  return event.recorded;
}

}  // namespace
}  // namespace winnow::emulator

using namespace winnow::emulator;

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* handle, unsigned flags) {
  return call([&] {
    constexpr unsigned kKnown =
        cudaEventBlockingSync | cudaEventDisableTiming | cudaEventInterprocess;
    require(handle != nullptr && (flags & ~kKnown) == 0);
    auto event = std::make_unique<Event>();
    event->timed = (flags & cudaEventDisableTiming) == 0;
    const std::lock_guard lock(streams_mutex());
    live_events().insert(event.get());
    *handle = reinterpret_cast<cudaEvent_t>(event.release());
  });
}

cudaError_t cudaEventCreate(cudaEvent_t* handle) {
  return cudaEventCreateWithFlags(handle, cudaEventDefault);
}

cudaError_t cudaEventDestroy(cudaEvent_t handle) {
  return call([&] {
    const std::lock_guard lock(streams_mutex());
    Event* const event = &event_of(handle);
    live_events().erase(event);
    delete event;
  });
}

cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t stream_handle) {
  return call([&] {
    const std::shared_ptr<Stream> stream = find_stream(stream_handle);
    {
      const std::lock_guard lock(streams_mutex());
      Event& event = event_of(handle);
      event.captured = stream->capture != nullptr;
      if (event.captured) return;
    }
    const Ticket ticket = enqueue(stream, {});
    const std::lock_guard lock(streams_mutex());
    event_of(handle).recorded = ticket;
  });
}

cudaError_t cudaEventQuery(cudaEvent_t handle) {
  return call([&] {
    refuse_while_capturing();
    require(is_done(recorded(handle)), cudaErrorNotReady);
  });
}

cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  return call([&] {
    refuse_while_capturing();
    wait_for(recorded(handle));
  });
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  return call([&] {
    require(milliseconds != nullptr);
    const std::lock_guard lock(streams_mutex());
    const Event& first = event_of(start);
    const Event& second = event_of(end);
    for (const Event* event : {&first, &second})
      require(event->timed && event->recorded != nullptr, cudaErrorInvalidResourceHandle);
    require(first.recorded->done && second.recorded->done, cudaErrorNotReady);
    const std::chrono::duration<float, std::milli> time =
        second.recorded->time - first.recorded->time;
    *milliseconds = time.count();
  });
}
