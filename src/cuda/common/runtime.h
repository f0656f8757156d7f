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
  int shared_bytes = 0;  // the most shared memory that one block can have
};

/// What the runtime said when it was first asked, and the devices it has.
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
  /// May be set up before the launch before it has ended; see wait_for_launch_before. Where kernels
  /// cannot wait by themselves it is a launch like any other.
  bool early = false;
  std::source_location where = std::source_location::current();
};

/// Blocks of one launch; kernels walk over more work than that in strides of the grid.
inline constexpr std::int64_t kMaxBlocks = (std::int64_t{1} << 31) - 1;

/// Lets a kernel have as much shared memory as the current device has for a block. Always the same
/// number, so that two threads that launch the same kernel do not take it from each other.
void allow_all_shared_memory(const void* kernel, std::source_location where);

/// Whether the code of a kernel that the current device runs has wait_for_launch_before in it.
bool can_wait_by_itself(const void* kernel, std::source_location where);

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
    how_.early = how.early && can_wait_by_itself(reinterpret_cast<const void*>(kernel), how.where);
  }

  template <class... Arguments>
  void operator()(Arguments&&... arguments) const {
    if (how_.blocks == 0) return;
    cudaLaunchAttribute early{};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(how_.blocks));
    config.blockDim = dim3(static_cast<unsigned>(how_.threads));
    config.dynamicSmemBytes = how_.shared_bytes;
    config.stream = how_.stream;
    config.attrs = &early;
    config.numAttrs = how_.early ? 1 : 0;
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
/// What every thread of an early launch does before anything with global memory, however little it
/// has to do: nothing that the launch before has written is there before.
__device__ inline void wait_for_launch_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
#endif

/// Slices of the caller's workspace, or of memory taken and given back in the order of the stream.
/// The device of the stream is current. Nothing waits, and a graph can capture all of it.
class Workspace {
 public:
  static constexpr std::size_t kAlignment = 256;

  /// What slices of these sizes take of a workspace that is itself aligned to less.
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

/// Empty if `bytes` of workspace are within the limit.
std::string over_limit(std::size_t bytes, const Execution& execution);

/// Whether all rows of a tensor begin at 16-byte boundaries, so that they can be copied in such
/// pieces.
bool has_aligned_rows(const Tensor& tensor);

}  // namespace winnow::cuda
