// SPDX-License-Identifier: Apache-2.0
// Memory of CUDA devices.
#include <string>

#include <cuda_runtime_api.h>

#include "harness/device_memory.h"
#include "winnow/error.h"

namespace winnow::harness {
namespace {

void check(cudaError_t result) {
  if (result == cudaSuccess) return;
  const ErrorCode code =
      result == cudaErrorMemoryAllocation ? ErrorCode::out_of_memory : ErrorCode::device;
  throw Error(code, std::string("CUDA: ") + cudaGetErrorString(result));
}

}  // namespace

void* allocate_on_cuda(std::int32_t device, std::size_t bytes) {
  void* memory = nullptr;
  check(cudaSetDevice(device));
  check(cudaMalloc(&memory, bytes));
  return memory;
}

void free_on_cuda(std::int32_t device, void* memory) noexcept {
  cudaSetDevice(device);
  cudaFree(memory);
}

void copy_with_cuda(std::int32_t device, void* to, const void* from, std::size_t bytes) {
  check(cudaSetDevice(device));
  check(cudaDeviceSynchronize());
  check(cudaMemcpy(to, from, bytes, cudaMemcpyDefault));
  check(cudaDeviceSynchronize());
}

std::size_t bytes_in_use_on_cuda(std::int32_t device) {
  std::size_t free = 0;
  std::size_t total = 0;
  check(cudaSetDevice(device));
  check(cudaDeviceSynchronize());
  check(cudaMemGetInfo(&free, &total));
  return total - free;
}

}  // namespace winnow::harness
