// SPDX-License-Identifier: Apache-2.0
// The CUDA runtime as the launchers use it: errors, devices, launches, workspace slices.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <source_location>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>

#include "winnow/execution.h"
#include "winnow/tensor.h"

namespace winnow::cuda {

/// Throws Error(device), or Error(out_of_memory), with the runtime's words and the place.
void cuda_check(cudaError_t result, std::source_location where = std::source_location::current());

/// Makes a device current for the time of a call.
class DeviceGuard {
 public:
  explicit DeviceGuard(Device device);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = 0;
  int current_ = 0;
};

struct DeviceProperties {
  std::string name;
  int major = 0;  // compute capability
  int minor = 0;
  int multiprocessors = 0;
  int shared_bytes = 0;  // the most shared memory that a block can opt in to
};

/// The runtime's answer when it was first asked, and the devices it has.
struct Machine {
  cudaError_t error = cudaSuccess;
  std::vector<DeviceProperties> devices;
};
/// Read once, at the first call.
const Machine& machine();
/// `device` is one of the machine's.
const DeviceProperties& device_properties(Device device);

/// A one-dimensional launch on the current device.
struct Launch {
  std::int64_t blocks = 0;  // at most kMaxBlocks
  int threads = 0;
  std::size_t shared_bytes = 0;
  cudaStream_t stream = nullptr;
  /// Programmatic dependent launch (PDL): the grid may be set up before the previous one has ended;
  /// see wait_for_previous_grid. It is an ordinary launch where the kernel's code cannot wait.
  bool pdl = false;
  std::source_location where = std::source_location::current();
};

/// The most blocks of one launch; kernels walk over more work in strides of the grid.
inline constexpr std::int64_t kMaxBlocks = (std::int64_t{1} << 31) - 1;

/// Lets a kernel use as much shared memory as the current device has for a block. The limit is
/// always the same, so that two threads that launch the same kernel do not lower it for each other.
void allow_all_shared_memory(const void* kernel, std::source_location where);

/// Whether the code that the current device runs for a kernel contains griddepcontrol.wait.
bool supports_pdl(const void* kernel, std::source_location where);

/// A kernel that is ready to be launched any number of times. It has no static shared memory if it
/// asks for more than 48 KiB.
template <class... Parameters>
class Launcher {
 public:
  Launcher(void (*kernel)(Parameters...), const Launch& how) : kernel_(kernel), how_(how) {
    constexpr std::size_t kWithoutAsking = 48 * 1024;
    if (how.blocks > 0 && how.shared_bytes > kWithoutAsking) {
      allow_all_shared_memory(reinterpret_cast<const void*>(kernel), how.where);
    }
    how_.pdl = how.pdl && supports_pdl(reinterpret_cast<const void*>(kernel), how.where);
  }

  template <class... Arguments>
  void operator()(Arguments&&... arguments) const {
    if (how_.blocks == 0) return;
    cudaLaunchAttribute pdl{};
    pdl.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    pdl.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(how_.blocks));
    config.blockDim = dim3(static_cast<unsigned>(how_.threads));
    config.dynamicSmemBytes = how_.shared_bytes;
    config.stream = how_.stream;
    config.attrs = &pdl;
    config.numAttrs = how_.pdl ? 1 : 0;
    cuda_check(cudaLaunchKernelEx(&config, kernel_, Parameters(arguments)...), how_.where);
  }

 private:
  void (*kernel_)(Parameters...);
  Launch how_;
};

template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), const Launch& how, Arguments&&... arguments) {
  Launcher(kernel, how)(std::forward<Arguments>(arguments)...);
}

#ifdef __CUDACC__
/// Waits until the previous grid has ended and its writes are visible. With PDL every thread calls
/// this before it touches global memory, however little it has to do.
__device__ inline void wait_for_previous_grid() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
#endif

/// Slices of the caller's workspace, or of memory allocated and freed in stream order. The stream's
/// device is current. Nothing waits, and a graph can capture all of it.
class Workspace {
 public:
  static constexpr std::size_t kAlignment = 256;

  /// Bytes that slices of these sizes take, whatever the alignment of the workspace itself.
  static std::size_t bytes(std::initializer_list<std::size_t> slices);

  Workspace(const Execution& execution, std::size_t bytes);
  ~Workspace();
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  template <class T>
  T* take(std::int64_t count) {
    return reinterpret_cast<T*>(take_bytes(static_cast<std::size_t>(count) * sizeof(T)));
  }

 private:
  std::byte* take_bytes(std::size_t size);

  cudaStream_t stream_;
  void* owned_ = nullptr;
  std::byte* next_ = nullptr;
  std::byte* end_ = nullptr;
};

/// Where the elements of a tensor begin; null for an absent one.
template <class T>
T* data_of(const Tensor& tensor) {
  return tensor ? static_cast<T*>(tensor.data) : nullptr;
}

/// Blocks for `work` items, of which one block takes `per_block` at a time.
inline std::int64_t blocks_for(std::int64_t work, std::int64_t per_block) {
  return std::min((work + per_block - 1) / per_block, kMaxBlocks);
}

/// A sentence of core/refusals.h with its values filled in; fmt's own check of such a text at
/// compile time does not pass nvcc.
std::string sentence(const char* refusal, std::string_view value);
std::string sentence(const char* refusal, std::string_view what, std::int64_t number);

/// Empty if the device has the instructions of Hopper alone, for which *_sm90.cu are compiled.
std::string needs_sm90(Device device);
/// Empty if, besides, the tensor is of bf16 or f16.
std::string needs_sm90_and_16_bits(const Tensor& tensor);

/// Empty if `bytes` of workspace are within the limit.
std::string over_limit(std::size_t bytes, const Execution& execution);

/// Whether all rows of a tensor begin at 16-byte boundaries, so that they can be copied in such
/// pieces.
bool has_aligned_rows(const Tensor& tensor);

}  // namespace winnow::cuda
