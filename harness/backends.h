// SPDX-License-Identifier: Apache-2.0
// The backends that a check can run on here.
#pragma once

#include <vector>

#include "winnow/execution.h"
#include "winnow/tensor.h"

namespace winnow::harness {

/// Those of reference, cpu and cuda that are in this build and usable on this machine.
std::vector<Backend> usable_backends();

/// The device whose memory the backend works on.
Device device_of(Backend backend);

}  // namespace winnow::harness
