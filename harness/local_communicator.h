// SPDX-License-Identifier: Apache-2.0
// Ranks as threads of one process: a communicator over their common memory, for CPU tensors.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <vector>

#include "winnow/parallel.h"

namespace winnow::harness {

/// The communicators of all ranks, each for a thread of its own. They keep the rules of
/// winnow/parallel.h, time-outs included.
std::vector<std::unique_ptr<Communicator>> local_communicators(
    int ranks, std::chrono::milliseconds timeout = kCommunicationTimeout);

/// Calls body(communicator) on a thread for every rank, waits for all of them, then throws what the
/// lowest rank threw, if any did.
void on_local_ranks(int ranks, const std::function<void(Communicator&)>& body,
                    std::chrono::milliseconds timeout = kCommunicationTimeout);

}  // namespace winnow::harness
