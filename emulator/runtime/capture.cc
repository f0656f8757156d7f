// SPDX-License-Identifier: Apache-2.0
// Turns the work of a stream into a graph while the stream captures.
#include "emulator/runtime/capture.h"

#include <utility>

#include "emulator/runtime/errors.h"

namespace winnow::emulator {
namespace {

thread_local cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;

[[noreturn]] void invalidate(Capture& capture, cudaError_t code) {
  capture.invalidated = true;
  fail(code);
}

/// The legacy stream would wait for streams that capture, and they for it.
void refuse_implicit_waits() {
  for_each_stream([](Stream& stream) {
    if (stream.blocking && stream.capture != nullptr)
      invalidate(*stream.capture, cudaErrorStreamCaptureImplicit);
  });
}

}  // namespace

Ticket enqueue(const std::shared_ptr<Stream>& stream, Action action) {
  {
    const std::lock_guard lock(streams_mutex());
    if (stream->legacy) refuse_implicit_waits();
    if (stream->capture != nullptr) {
      Capture& capture = *stream->capture;
      require(!capture.invalidated, cudaErrorStreamCaptureInvalidated);
      capture.graph->add(std::move(action));
      return nullptr;
    }
  }
  return submit(stream, std::move(action.run), action.on_host ? At::later : At::once);
}

bool is_capturing(const std::shared_ptr<Stream>& stream) {
  const std::lock_guard lock(streams_mutex());
  return stream->capture != nullptr;
}

void refuse_capturing(const std::shared_ptr<Stream>& stream) {
  const std::lock_guard lock(streams_mutex());
  if (stream->legacy) refuse_implicit_waits();
  if (stream->capture != nullptr) invalidate(*stream->capture, cudaErrorStreamCaptureUnsupported);
}

void refuse_while_capturing() {
  const std::lock_guard lock(streams_mutex());
  if (thread_mode == cudaStreamCaptureModeRelaxed) return;
  for_each_stream([](Stream& stream) {
    if (stream.capture == nullptr) return;
    Capture& capture = *stream.capture;
    const bool own = capture.thread == std::this_thread::get_id() &&
                     capture.mode != cudaStreamCaptureModeRelaxed;
    const bool global =
        thread_mode == cudaStreamCaptureModeGlobal && capture.mode == cudaStreamCaptureModeGlobal;
    if (own || global) invalidate(capture, cudaErrorStreamCaptureUnsupported);
  });
}

}  // namespace winnow::emulator

using namespace winnow::emulator;

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  return call([&] {
    require(mode != nullptr);
    std::swap(*mode, thread_mode);
  });
}

cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
  return call([&] {
    const std::shared_ptr<Stream> stream = find_stream(handle);
    require(!stream->legacy, cudaErrorStreamCaptureUnsupported);
    const std::lock_guard lock(streams_mutex());
    require(stream->capture == nullptr, cudaErrorIllegalState);
    const auto capture = std::make_shared<Capture>();
    capture->mode = mode;
    capture->thread = std::this_thread::get_id();
    stream->capture = capture;
  });
}

cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
  return call([&] {
    require(graph != nullptr);
    *graph = nullptr;
    const std::shared_ptr<Stream> stream = find_stream(handle);
    const std::lock_guard lock(streams_mutex());
    const std::shared_ptr<Capture> capture = stream->capture;
    require(capture != nullptr, cudaErrorIllegalState);
    require(capture->mode == cudaStreamCaptureModeRelaxed ||
                capture->thread == std::this_thread::get_id(),
            cudaErrorStreamCaptureWrongThread);
    stream->capture = nullptr;
    require(!capture->invalidated, cudaErrorStreamCaptureInvalidated);
    *graph = handle_of(capture->graph.release());
  });
}

cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* status) {
  return call([&] {
    require(status != nullptr);
    const std::shared_ptr<Stream> stream = find_stream(handle);
    const std::lock_guard lock(streams_mutex());
    *status = stream->capture == nullptr     ? cudaStreamCaptureStatusNone
              : stream->capture->invalidated ? cudaStreamCaptureStatusInvalidated
                                             : cudaStreamCaptureStatusActive;
  });
}
