// SPDX-License-Identifier: Apache-2.0
// Calls of the runtime on streams.
#include "emulator/runtime/capture.h"
#include "emulator/runtime/errors.h"
#include "emulator/runtime/stream.h"

using namespace winnow::emulator;

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* handle, unsigned flags) {
  return call([&] {
    require(handle != nullptr);
    *handle = make_stream(flags);
  });
}

cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  return call([&] { forget_stream(handle); });
}

cudaError_t cudaStreamQuery(cudaStream_t handle) {
  return call([&] {
    const std::shared_ptr<Stream> stream = find_stream(handle);
    refuse_capturing(stream);
    const std::lock_guard lock(streams_mutex());
    for (const Ticket& ticket : tickets_before(*stream)) require(ticket->done, cudaErrorNotReady);
  });
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  return call([&] {
    const std::shared_ptr<Stream> stream = find_stream(handle);
    refuse_capturing(stream);
    wait_for(submit(stream, nullptr));
  });
}

cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t function, void* data) {
  return call([&] {
    require(function != nullptr);
    enqueue(find_stream(handle), {.run = [=] { function(data); }, .on_host = true});
  });
}

cudaError_t cudaDeviceSynchronize() {
  return call([] {
    refuse_while_capturing();
    wait_for_all_streams();
  });
}
