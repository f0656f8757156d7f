// SPDX-License-Identifier: Apache-2.0
// Context parallel on a CUDA device: allocation, copies, and the permutation of rows.
//
// One warp copies one row, with 16-byte accesses if all rows are aligned to 16 bytes. Bound by
// memory bandwidth.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/common/runtime.h"
#include "parallel/device.h"

namespace winnow::parallel {
namespace {

using cuda::cuda_check;
using cuda::DeviceGuard;

constexpr int kLanes = 32;
constexpr int kRowsPerBlock = 8;

/// A row-major matrix with elements of type T.
template <class T>
struct Matrix {
  T* data;
  std::int64_t stride;
};

struct Size {
  std::int64_t rows;
  std::int64_t width;
  std::int64_t runs;
};

/// Stores a value, rounded to the type of `to`.
template <class T>
__device__ void store(T value, T& to) {
  to = value;
}
__device__ void store(float value, __nv_bfloat16& to) { to = __float2bfloat16_rn(value); }
__device__ void store(float value, __half& to) { to = __float2half_rn(value); }

/// Binary search for the run that contains row i.
__device__ Run find_run(const Run* runs, std::int64_t count, std::int64_t i) {
  std::int64_t low = 0;
  while (count > 1) {
    const std::int64_t half = count / 2;
    if (runs[low + half].first <= i) low += half;
    count -= half;
  }
  return runs[low];
}

template <class From, class To>
__global__ void __launch_bounds__(kRowsPerBlock* kLanes)
    copy_rows_kernel(Matrix<const From> from, Matrix<To> to, const Run* runs, Size size) {
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const std::int64_t step = std::int64_t{gridDim.x} * kRowsPerBlock;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kRowsPerBlock + threadIdx.x / kLanes;
       i < size.rows; i += step) {
    const Run run = find_run(runs, size.runs, i);
    const From* const source = from.data + (run.from + i - run.first) * from.stride;
    To* const target = to.data + (run.to + i - run.first) * to.stride;
    for (std::int64_t d = lane; d < size.width; d += kLanes) store(source[d], target[d]);
  }
}

/// Launches the copy with accesses of type From and To, each `elements_per_access` elements wide.
template <class From, class To>
void launch_copy(const Tensor& from, const Tensor& to, const Run* runs, Size size,
                 int elements_per_access, const Execution& execution) {
  size.width /= elements_per_access;
  cuda::launch(
      copy_rows_kernel<From, To>,
      {.blocks = cuda::blocks_for(size.rows, kRowsPerBlock),
       .threads = kRowsPerBlock * kLanes,
       .stream = execution.stream},
      Matrix<const From>{static_cast<const From*>(from.data), from.stride[0] / elements_per_access},
      Matrix<To>{static_cast<To*>(to.data), to.stride[0] / elements_per_access}, runs, size);
}

template <class T>
void launch_plain_copy(const Tensor& from, const Tensor& to, const Run* runs, const Size& size,
                       const Execution& execution) {
  const int elements_per_vector = sizeof(uint4) / sizeof(T);
  const bool is_vectorized = size.width % elements_per_vector == 0 &&
                             cuda::has_aligned_rows(from) && cuda::has_aligned_rows(to);
  if (is_vectorized) {
    launch_copy<uint4, uint4>(from, to, runs, size, elements_per_vector, execution);
  } else {
    launch_copy<T, T>(from, to, runs, size, 1, execution);
  }
}

}  // namespace

void* allocate_on_device(Device device, std::size_t bytes, const Execution& execution) {
  const DeviceGuard guard(device);
  void* memory = nullptr;
  cuda_check(cudaMallocAsync(&memory, bytes, execution.stream));
  return memory;
}

void free_on_device(Device device, void* memory, const Execution& execution) noexcept {
  int previous = 0;
  cudaGetDevice(&previous);
  cudaSetDevice(device.index);              // stream 0 means that of the current device
  cudaFreeAsync(memory, execution.stream);  // errors surface at the caller's next CUDA call
  cudaSetDevice(previous);
}

void copy_rows_on_device(const Tensor& from, const Tensor& to, std::span<const Run> runs,
                         std::int64_t rows, const Execution& execution) {
  const DeviceGuard guard(from.device);
  Execution own = execution;  // the caller's workspace is in use: it holds the rows
  own.workspace = nullptr;
  cuda::Workspace workspace(own, cuda::Workspace::bytes({runs.size_bytes()}));
  Run* const on_device = workspace.take<Run>(static_cast<std::int64_t>(runs.size()));
  cuda_check(cudaMemcpyAsync(on_device, runs.data(), runs.size_bytes(), cudaMemcpyHostToDevice,
                             execution.stream));
  const Size size{rows, from.shape[1], static_cast<std::int64_t>(runs.size())};
  if (from.dtype != to.dtype) {
    if (to.dtype == DType::bf16) {
      launch_copy<float, __nv_bfloat16>(from, to, on_device, size, 1, execution);
    } else {
      launch_copy<float, __half>(from, to, on_device, size, 1, execution);
    }
    return;
  }
  switch (element_bytes(from.dtype)) {
    case 1:
      return launch_plain_copy<std::uint8_t>(from, to, on_device, size, execution);
    case 2:
      return launch_plain_copy<std::uint16_t>(from, to, on_device, size, execution);
    case 4:
      return launch_plain_copy<std::uint32_t>(from, to, on_device, size, execution);
    default:
      return launch_plain_copy<std::uint64_t>(from, to, on_device, size, execution);
  }
}

void download(Device device, void* host, const void* memory, std::size_t bytes,
              const Execution& execution) {
  const DeviceGuard guard(device);
  cuda_check(cudaMemcpyAsync(host, memory, bytes, cudaMemcpyDeviceToHost, execution.stream));
  cuda_check(cudaStreamSynchronize(execution.stream));
}

void upload(Device device, void* memory, const void* host, std::size_t bytes,
            const Execution& execution) {
  const DeviceGuard guard(device);
  cuda_check(cudaMemcpyAsync(memory, host, bytes, cudaMemcpyHostToDevice, execution.stream));
  cuda_check(cudaStreamSynchronize(execution.stream));
}

}  // namespace winnow::parallel
