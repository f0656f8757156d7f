// SPDX-License-Identifier: Apache-2.0
// Times of a call.
#pragma once

#include <functional>

#include "winnow/tensor.h"

namespace winnow::tools {

struct Timing {
  double median = 0;  // seconds of one call, as the others
  double fastest = 0;
  double slowest = 0;
  int repeats = 0;
};

/// Seconds of one call, on a CUDA device by its own clock.
double time_once(Device device, const std::function<void()>& call);

/// Warms up with one call, then times `repeats` samples. On the CPU a sample of a call that is over
/// in less than some milliseconds is a row of calls; on a CUDA device each sample starts with a
/// cold cache. Throws Interrupted after Ctrl-C.
Timing measure(Device device, int repeats, const std::function<void()>& call);

}  // namespace winnow::tools
