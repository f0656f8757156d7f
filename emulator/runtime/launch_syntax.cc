// SPDX-License-Identifier: Apache-2.0
// What nvcc makes of kernel<<<grid, block, bytes, stream>>>(...).
#include <vector>

#include "emulator/runtime/capture.h"
#include "emulator/runtime/errors.h"
#include "emulator/runtime/launch.h"
#include "emulator/runtime/registry.h"

namespace {

struct Configuration {
  dim3 grid;
  dim3 block;
  std::size_t shared_bytes;
  cudaStream_t stream;
};
thread_local std::vector<Configuration> configurations;

}  // namespace

using namespace winnow::emulator;

extern "C" {

/// Zero if the launch may go on.
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, std::size_t shared_bytes,
                                     cudaStream_t stream) {
  configurations.push_back({grid, block, shared_bytes, stream});
  return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, std::size_t* shared_bytes,
                                       void* stream) {
  if (configurations.empty()) return remember(cudaErrorMissingConfiguration);
  const Configuration& last = configurations.back();
  *grid = last.grid;
  *block = last.block;
  *shared_bytes = last.shared_bytes;
  *static_cast<cudaStream_t*>(stream) = last.stream;
  configurations.pop_back();
  return cudaSuccess;
}

cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* stub) {
  return call([&] { *kernel = reinterpret_cast<cudaKernel_t>(&find_kernel(stub)); });
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** parameters,
                               std::size_t shared_bytes, cudaStream_t stream) {
  return call([&] {
    const LaunchShape shape{.grid = grid, .block = block, .shared_bytes = shared_bytes};
    enqueue(find_stream(stream), kernel_action(kernel, shape, parameters));
  });
}
}
