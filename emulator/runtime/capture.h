// SPDX-License-Identifier: Apache-2.0
// Captures: work of a stream that becomes nodes of a graph.
#pragma once

#include <memory>
#include <thread>

#include <cuda_runtime_api.h>

#include "emulator/runtime/graph.h"
#include "emulator/runtime/stream.h"

namespace winnow::emulator {

struct Capture {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
  std::thread::id thread;  // that began it
  std::unique_ptr<Graph> graph = std::make_unique<Graph>();
  bool invalidated = false;  // by a call that is not allowed meanwhile
};

/// Makes a node of the work if the stream captures, else enqueues it; null of a node.
Ticket enqueue(const std::shared_ptr<Stream>& stream, Action action);

bool is_capturing(const std::shared_ptr<Stream>& stream);
/// Fails, and invalidates the capture, if the stream captures.
void refuse_capturing(const std::shared_ptr<Stream>& stream);
/// Fails, and invalidates captures, where one is going on that forbids calls which may wait for
/// other streams, such as cudaMalloc.
void refuse_while_capturing();

}  // namespace winnow::emulator
