// SPDX-License-Identifier: Apache-2.0
// Times of a call.
#include "tools/timing.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <vector>

#include "harness/device_product.h"
#include "tools/interrupt.h"

namespace winnow::tools {
namespace {

constexpr double kLeastSampleSeconds = 5e-3;
constexpr double kMostCalls = 1000;

double time_on_host(const std::function<void()>& call) {
  const auto start = std::chrono::steady_clock::now();
  call();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

/// Samples of a call that returns when it is done.
std::vector<double> host_samples(int repeats, const std::function<void()>& call) {
  const double warm_up = std::max(time_on_host(call), 1e-9);
  const int calls =
      static_cast<int>(std::clamp(std::ceil(kLeastSampleSeconds / warm_up), 1.0, kMostCalls));
  std::vector<double> samples(repeats);
  for (double& sample : samples) {
    stop_if_interrupted();
    sample = time_on_host([&] {
      for (int i = 0; i < calls; ++i) call();
    });
    sample /= calls;
  }
  return samples;
}

/// Samples by the device's clock, each with nothing of the call's in the cache.
std::vector<double> device_samples(Device device, int repeats, const std::function<void()>& call) {
  call();
  std::vector<double> samples(repeats);
  for (double& sample : samples) {
    stop_if_interrupted();
    harness::flush_device_cache(device);
    sample = harness::time_on_device(device, call);
  }
  return samples;
}

}  // namespace

double time_once(Device device, const std::function<void()>& call) {
  return device.kind == DeviceKind::cpu ? time_on_host(call)
                                        : harness::time_on_device(device, call);
}

Timing measure(Device device, int repeats, const std::function<void()>& call) {
  std::vector<double> samples = device.kind == DeviceKind::cpu
                                    ? host_samples(repeats, call)
                                    : device_samples(device, repeats, call);
  std::sort(samples.begin(), samples.end());
  const std::size_t middle = samples.size() / 2;
  const double median =
      samples.size() % 2 == 1 ? samples[middle] : (samples[middle - 1] + samples[middle]) / 2;
  return {median, samples.front(), samples.back(), repeats};
}

}  // namespace winnow::tools
