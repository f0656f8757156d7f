// SPDX-License-Identifier: Apache-2.0
// The cuda backend's table; per op the kernels in order of preference.
#include "backend.h"

#include <array>

#include <fmt/format.h>

#include "cuda/common/runtime.h"
#include "cuda/ops.h"

namespace winnow {
namespace {

constexpr int kLeastMajor = 8;  // compute capability: bf16 in the tensor cores, cp.async

/// The first kernel whose why_not is empty runs. The last of a list takes every shape, so that its
/// sentence is the one that counts where none can.
template <class Args>
constexpr std::array kKernels = {
    Op<Args>{cuda::why_not, cuda::workspace_bytes, cuda::run},
};

template <>
constexpr std::array kKernels<IndexTopkForward> = {
    Op<IndexTopkForward>{cuda::why_not_sm90, cuda::workspace_bytes_sm90, cuda::run_sm90},
    Op<IndexTopkForward>{cuda::why_not_general, cuda::workspace_bytes_general, cuda::run_general},
};

template <>
constexpr std::array kKernels<SparseAttentionForward> = {
    Op<SparseAttentionForward>{cuda::why_not_sm90, cuda::workspace_bytes, cuda::run_sm90},
    Op<SparseAttentionForward>{cuda::why_not_narrow, cuda::workspace_bytes, cuda::run_narrow},
    Op<SparseAttentionForward>{cuda::why_not_general, cuda::workspace_bytes, cuda::run_general},
    Op<SparseAttentionForward>{cuda::why_not_f32, cuda::workspace_bytes, cuda::run_f32},
};

template <>
constexpr std::array kKernels<SparseAttentionBackward> = {
    Op<SparseAttentionBackward>{cuda::why_not_sm90, cuda::workspace_bytes_sm90, cuda::run_sm90},
    Op<SparseAttentionBackward>{cuda::why_not_general, cuda::workspace_bytes_general,
                                cuda::run_general},
};

/// All tensors of a call are on one device: that of any which is always there.
template <class Args>
Device device_of(const Args& args) {
  if constexpr (requires { args.indices; }) {
    return args.indices.device;
  } else if constexpr (requires { args.cu_seqlens; }) {
    return args.cu_seqlens.device;
  } else if constexpr (requires { args.q; }) {
    return args.q.device;
  } else if constexpr (requires { args.out; }) {
    return args.out.device;
  } else {
    return args.x.device;
  }
}

std::string why_not_device(Device device) {
  const auto count = static_cast<int>(cuda::machine().devices.size());
  if (device.index < 0 || device.index >= count) {
    return fmt::format("has no device {}: there are {}", device.index, count);
  }
  const cuda::DeviceProperties& properties = cuda::device_properties(device);
  if (properties.major < kLeastMajor) {
    return fmt::format("needs compute capability {}.0, {} has {}.{}", kLeastMajor, properties.name,
                       properties.major, properties.minor);
  }
  return {};
}

template <class Args>
std::string why_not_op(const Args& args, const Execution& execution) {
  std::string reason = why_not_device(device_of(args));
  if (!reason.empty()) return reason;
  for (const Op<Args>& kernel : kKernels<Args>) {
    reason = kernel.why_not(args, execution);
    if (reason.empty()) break;
  }
  return reason;
}

template <class Args>
const Op<Args>& first_able(const Args& args, const Execution& execution) {
  for (const Op<Args>& kernel : kKernels<Args>) {
    if (kernel.why_not(args, execution).empty()) return kernel;
  }
  return kKernels<Args>.back();
}

template <class Args>
std::size_t workspace_bytes_of(const Args& args, const Execution& execution) {
  return first_able(args, execution).workspace_bytes(args, execution);
}

template <class Args>
void run_op(const Args& args, const Execution& execution) {
  first_able(args, execution).run(args, execution);
}

template <class Args>
constexpr Op<Args> op() {
  return {why_not_op<Args>, workspace_bytes_of<Args>, run_op<Args>};
}

std::string why_not_here() {
  const cuda::Machine& machine = cuda::machine();
  switch (machine.error) {
    case cudaSuccess:
      return machine.devices.empty() ? "finds no CUDA device" : "";
    case cudaErrorNoDevice:
      return "finds no CUDA device";
    case cudaErrorInsufficientDriver:
      return fmt::format("finds no NVIDIA driver, or one that is too old for CUDA {}.{}",
                         CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10);
    default:
      return fmt::format("cannot start: {}", cudaGetErrorString(machine.error));
  }
}

std::string describe_devices() {
  const std::vector<cuda::DeviceProperties>& devices = cuda::machine().devices;
  const cuda::DeviceProperties& first = devices.front();
  std::string text = fmt::format("{} (sm_{}{})", first.name, first.major, first.minor);
  if (devices.size() > 1) text += fmt::format(", {} devices", devices.size());
  return text;
}

const BackendTable cuda_backend = {
    .backend = Backend::cuda,
    .reaches = DeviceKind::cuda,
    .why_not = why_not_here,
    .describe = describe_devices,
    .ops = {op<KeyWindows>(), op<WindowIndices>(), op<IndexTopkForward>(), op<IndexTopkBackward>(),
            op<SparseAttentionForward>(), op<SparseAttentionBackward>(),
            op<ValueProjectionForward>(), op<ValueProjectionBackward>(), op<IndexTarget>(),
            op<IndexLoss>(), op<DenseIndexLossForward>(), op<DenseIndexLossBackward>(),
            op<QuantizeFp8>()}};

}  // namespace

const BackendTable* find_cuda_backend() { return &cuda_backend; }

}  // namespace winnow
