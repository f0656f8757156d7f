// SPDX-License-Identifier: Apache-2.0
// What a CUDA device's own matrix product reaches, and times of work on it; in a build without CUDA
// there is no product, and the others refuse.
#pragma once

#include <functional>
#include <optional>

#include "winnow/tensor.h"

namespace winnow::harness {

/// FLOP/s of cuBLAS on a bf16 product of 8192^3, on random data: the median of several. Empty where
/// there is no cuBLAS.
std::optional<double> device_product_rate(Device device);

/// Fills the device's cache with what no tensor holds. Only enqueued, on the default stream: the
/// host starts what comes next meanwhile, so that its own time is not in what is measured then.
void flush_device_cache(Device device);

/// Seconds from the start to the end of what `call` enqueues on the default stream, by the device's
/// own clock.
double time_on_device(Device device, const std::function<void()>& call);

}  // namespace winnow::harness
