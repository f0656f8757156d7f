// SPDX-License-Identifier: Apache-2.0
#include "cuda/common/runtime.h"

#include <cassert>

#include <fmt/format.h>

#include "core/refusals.h"
#include "winnow/error.h"

namespace winnow::cuda {
namespace {

constexpr std::size_t kVectorBytes = 16;

template <class T>
T round_up(T value, T multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

int attribute(cudaDeviceAttr which, int device) {
  int value = 0;
  cuda_check(cudaDeviceGetAttribute(&value, which, device));
  return value;
}

Machine read_machine() {
  Machine machine;
  int count = 0;
  machine.error = cudaGetDeviceCount(&count);
  if (machine.error != cudaSuccess) {
    cudaGetLastError();  // why_not reports it; the next launch must not
    return machine;
  }
  for (int device = 0; device < count; ++device) {
    cudaDeviceProp properties{};
    cuda_check(cudaGetDeviceProperties(&properties, device));
    machine.devices.push_back(
        {.name = properties.name,
         .major = properties.major,
         .minor = properties.minor,
         .multiprocessors = properties.multiProcessorCount,
         .shared_bytes = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device)});
  }
  return machine;
}

}  // namespace

void cuda_check(cudaError_t result, std::source_location where) {
  if (result == cudaSuccess) return;
  cudaGetLastError();  // the next call reports its own errors
  const ErrorCode code =
      result == cudaErrorMemoryAllocation ? ErrorCode::out_of_memory : ErrorCode::device;
  throw Error(code, fmt::format("CUDA: {} ({}), in {}", cudaGetErrorString(result),
                                cudaGetErrorName(result), where.function_name()));
}

DeviceGuard::DeviceGuard(Device device) : current_(device.index) {
  cuda_check(cudaGetDevice(&previous_));
  if (previous_ != current_) cuda_check(cudaSetDevice(current_));
}

DeviceGuard::~DeviceGuard() {
  if (previous_ != current_) cudaSetDevice(previous_);
}

const Machine& machine() {
  static const Machine read_once = read_machine();
  return read_once;
}

const DeviceProperties& device_properties(Device device) {
  return machine().devices.at(static_cast<std::size_t>(device.index));
}

void allow_all_shared_memory(const void* kernel, std::source_location where) {
  int device = 0;
  cuda_check(cudaGetDevice(&device), where);
  cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  device_properties({DeviceKind::cuda, device}).shared_bytes),
             where);
}

bool supports_pdl(const void* kernel, std::source_location where) {
  constexpr int kFirst = 90;  // griddepcontrol exists in code for compute capability 9.0 and later
  cudaFuncAttributes attributes{};
  cuda_check(cudaFuncGetAttributes(&attributes, kernel), where);
  return attributes.ptxVersion >= kFirst;
}

std::size_t Workspace::bytes(std::initializer_list<std::size_t> slices) {
  std::size_t sum = 0;
  for (const std::size_t slice : slices) sum += round_up(slice, kAlignment);
  return sum == 0 ? 0 : sum + kAlignment;
}

Workspace::Workspace(const Execution& execution, std::size_t bytes) : stream_(execution.stream) {
  if (bytes == 0) return;
  void* memory = execution.workspace;
  if (memory == nullptr) {
    cuda_check(cudaMallocAsync(&owned_, bytes, stream_));
    memory = owned_;
  }
  end_ = static_cast<std::byte*>(memory) + bytes;
  next_ = reinterpret_cast<std::byte*>(
      round_up(reinterpret_cast<std::uintptr_t>(memory), std::uintptr_t{kAlignment}));
}

Workspace::~Workspace() {
  // A broken stream is reported by the caller's next call.
  if (owned_ != nullptr) cudaFreeAsync(owned_, stream_);
}

std::byte* Workspace::take_bytes(std::size_t size) {
  std::byte* const taken = next_;
  next_ += round_up(size, kAlignment);
  assert(next_ <= end_);
  return taken;
}

std::string sentence(const char* refusal, std::string_view value) {
  return fmt::format(fmt::runtime(refusal), value);
}

std::string sentence(const char* refusal, std::string_view what, std::int64_t number) {
  return fmt::format(fmt::runtime(refusal), what, number);
}

std::string needs_sm90(Device device) {
  const DeviceProperties& properties = device_properties(device);
  if (properties.major == 9 && properties.minor == 0) return {};
  return fmt::format(refusal::needs_capability, 9, 0, properties.name, properties.major,
                     properties.minor);
}

std::string needs_sm90_and_16_bits(const Tensor& tensor) {
  if (std::string reason = needs_sm90(tensor.device); !reason.empty()) return reason;
  if (tensor.dtype == DType::bf16 || tensor.dtype == DType::f16) return {};
  return sentence(refusal::takes_dtypes, "bf16 and f16");
}

std::string over_limit(std::size_t bytes, const Execution& execution) {
  if (bytes <= execution.workspace_limit) return {};
  return fmt::format(refusal::over_limit, bytes, execution.workspace_limit);
}

bool has_aligned_rows(const Tensor& tensor) {
  const auto element = static_cast<std::uintptr_t>(element_bytes(tensor.dtype));
  auto bits = reinterpret_cast<std::uintptr_t>(tensor.data);
  for (int i = 0; i + 1 < tensor.rank; ++i) {
    if (tensor.shape[i] > 1) bits |= static_cast<std::uintptr_t>(tensor.stride[i]) * element;
  }
  return bits % kVectorBytes == 0;
}

}  // namespace winnow::cuda
