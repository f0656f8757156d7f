// SPDX-License-Identifier: Apache-2.0
// The cuda backend's table.
#include "backend.h"

#include <fmt/format.h>

#include "backend_operators.h"
#include "core/refusals.h"
#include "cuda/common/runtime.h"

namespace winnow {
namespace {

constexpr int kLeastMajor = 8;  // compute capability: bf16 in the tensor cores, cp.async

struct Cuda {
  template <class Args>
  static Kernels<Args> kernels() {
    constexpr std::type_identity<Args> kOperator;
    if constexpr (requires { cuda::kernels(kOperator); }) {
      return cuda::kernels(kOperator);
    } else {
      return {};
    }
  }
};

std::string why_not_device(Device device) {
  const auto count = static_cast<int>(cuda::machine().devices.size());
  if (device.index < 0 || device.index >= count) {
    return fmt::format(refusal::no_such_device, device.index, count);
  }
  const cuda::DeviceProperties& properties = cuda::device_properties(device);
  if (properties.major < kLeastMajor) {
    return fmt::format(refusal::needs_capability, kLeastMajor, 0, properties.name, properties.major,
                       properties.minor);
  }
  return {};
}

std::string why_not_here() {
  const cuda::Machine& machine = cuda::machine();
  switch (machine.error) {
    case cudaSuccess:
      return machine.devices.empty() ? refusal::no_cuda_device : "";
    case cudaErrorNoDevice:
      return refusal::no_cuda_device;
    case cudaErrorInsufficientDriver:
      return fmt::format(refusal::no_driver, CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10);
    default:
      return fmt::format(refusal::cannot_start, cudaGetErrorString(machine.error));
  }
}

std::string describe_devices() {
  const std::vector<cuda::DeviceProperties>& devices = cuda::machine().devices;
  const cuda::DeviceProperties& first = devices.front();
  std::string text = fmt::format("{} (sm_{}{})", first.name, first.major, first.minor);
  if (devices.size() > 1) text += fmt::format(", {} devices", devices.size());
  return text;
}

const BackendTable cuda_backend = {.backend = Backend::cuda,
                                   .why_not = why_not_here,
                                   .why_not_device = why_not_device,
                                   .describe = describe_devices,
                                   .kernels = kernel_table<Cuda>()};

}  // namespace

const BackendTable* find_cuda_backend() { return &cuda_backend; }

}  // namespace winnow
