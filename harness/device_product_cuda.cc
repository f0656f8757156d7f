// SPDX-License-Identifier: Apache-2.0
// cuBLAS as the yardstick of a CUDA device, and the device's own clock. cuBLAS is opened at run
// time: the few names in use stand here, and no build needs its headers.
#include <algorithm>
#include <array>
#include <memory>
#include <string>
#include <vector>

#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <library_types.h>

#include "harness/device_memory.h"
#include "harness/device_product.h"
#include "harness/memory.h"
#include "harness/random.h"
#include "winnow/error.h"

namespace winnow::harness {
namespace {

constexpr int kSize = 8192;
constexpr int kRandomRows = 256;  // that are drawn; the rest of a matrix repeats them
constexpr int kWarmUps = 3;
constexpr int kRepeats = 10;
constexpr int kCacheSizes = 4;  // how often over the cache is flushed

void check(cudaError_t result) {
  if (result == cudaSuccess) return;
  throw Error(ErrorCode::device, std::string("CUDA: ") + cudaGetErrorString(result));
}

// ---- cuBLAS, as its header declares it.

using CublasHandle = struct cublasContext*;
enum CublasStatus : int { CUBLAS_STATUS_SUCCESS = 0 };
enum CublasOperation : int { CUBLAS_OP_N = 0, CUBLAS_OP_T = 1 };
enum CublasComputeType : int { CUBLAS_COMPUTE_32F = 68 };
enum CublasAlgorithm : int { CUBLAS_GEMM_DEFAULT = -1 };
using CublasCreate = CublasStatus (*)(CublasHandle*);
using CublasDestroy = CublasStatus (*)(CublasHandle);
using CublasGemmEx = CublasStatus (*)(CublasHandle, CublasOperation, CublasOperation, int m, int n,
                                      int k, const void* alpha, const void* a, cudaDataType_t,
                                      int lda, const void* b, cudaDataType_t, int ldb,
                                      const void* beta, void* c, cudaDataType_t, int ldc,
                                      CublasComputeType, CublasAlgorithm);

/// cuBLAS and a handle of the current device; empty if there is none. It is never closed: its
/// threads and those of the driver do not expect that.
class Cublas {
 public:
  Cublas() {
    void* library = nullptr;
    for (const int flags : {RTLD_NOLOAD, 0}) {  // first the one that the process has already
      for (const char* const name : {"libcublas.so.13", "libcublas.so.12"}) {
        if (library == nullptr) library = dlopen(name, RTLD_NOW | RTLD_LOCAL | flags);
      }
    }
    if (library == nullptr) return;
    const auto create = reinterpret_cast<CublasCreate>(dlsym(library, "cublasCreate_v2"));
    destroy_ = reinterpret_cast<CublasDestroy>(dlsym(library, "cublasDestroy_v2"));
    gemm_ = reinterpret_cast<CublasGemmEx>(dlsym(library, "cublasGemmEx"));
    if (create == nullptr || destroy_ == nullptr || gemm_ == nullptr) return;
    if (create(&handle_) != CUBLAS_STATUS_SUCCESS) handle_ = nullptr;
  }
  ~Cublas() {
    if (handle_ != nullptr) destroy_(handle_);
  }
  Cublas(const Cublas&) = delete;
  Cublas& operator=(const Cublas&) = delete;

  explicit operator bool() const { return handle_ != nullptr; }

  /// c = a^T b, all bf16 and kSize x kSize, on the default stream.
  void multiply(const void* a, const void* b, void* c) const {
    const float one = 1;
    const float zero = 0;
    const CublasStatus status = gemm_(handle_, CUBLAS_OP_T, CUBLAS_OP_N, kSize, kSize, kSize, &one,
                                      a, CUDA_R_16BF, kSize, b, CUDA_R_16BF, kSize, &zero, c,
                                      CUDA_R_16BF, kSize, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
    if (status != CUBLAS_STATUS_SUCCESS) {
      throw Error(ErrorCode::device, "cuBLAS: status " + std::to_string(status));
    }
  }

 private:
  CublasHandle handle_ = nullptr;
  CublasDestroy destroy_ = nullptr;
  CublasGemmEx gemm_ = nullptr;
};

// ---- Memory.

struct Free {
  std::int32_t device;
  void operator()(void* memory) const noexcept { free_on_cuda(device, memory); }
};
using Memory = std::unique_ptr<void, Free>;

Memory allocate(Device device, std::size_t bytes) {
  return {allocate_on_cuda(device.index, bytes), Free{device.index}};
}

constexpr std::size_t kRowBytes = std::size_t{kSize} * 2;

Memory random_matrix(Device device, std::string_view name) {
  Buffer drawn(device, DType::bf16, {kRandomRows, kSize});
  const Random random(0, name);
  drawn.fill([&](std::int64_t line, std::span<double> values) {
    for (std::size_t i = 0; i < values.size(); ++i) {
      values[i] = random.normal(line * kSize + static_cast<std::int64_t>(i));
    }
  });
  Memory matrix = allocate(device, kSize * kRowBytes);
  for (int row = 0; row < kSize; row += kRandomRows) {
    copy_with_cuda(device.index, static_cast<std::byte*>(matrix.get()) + row * kRowBytes,
                   drawn.tensor().data, kRandomRows * kRowBytes);
  }
  return matrix;
}

class Event {
 public:
  Event() { check(cudaEventCreate(&event_)); }
  ~Event() { cudaEventDestroy(event_); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  void record() { check(cudaEventRecord(event_)); }
  double seconds_since(const Event& start) const {
    float milliseconds = 0;
    check(cudaEventSynchronize(event_));
    check(cudaEventElapsedTime(&milliseconds, start.event_, event_));
    return milliseconds * 1e-3;
  }

 private:
  cudaEvent_t event_ = nullptr;
};

}  // namespace

std::optional<double> device_product_rate(Device device) {
  check(cudaSetDevice(device.index));
  const Cublas cublas;
  if (!cublas) return std::nullopt;
  const Memory a = random_matrix(device, "a");
  const Memory b = random_matrix(device, "b");
  const Memory c = allocate(device, kSize * kRowBytes);
  const auto multiply = [&] { cublas.multiply(a.get(), b.get(), c.get()); };
  for (int i = 0; i < kWarmUps; ++i) multiply();
  std::array<double, kRepeats> seconds{};
  for (double& each : seconds) each = time_on_device(device, multiply);
  std::sort(seconds.begin(), seconds.end());
  const double median = (seconds[(kRepeats - 1) / 2] + seconds[kRepeats / 2]) / 2;
  return 2.0 * kSize * kSize * kSize / median;
}

void flush_device_cache(Device device) {
  int cache_bytes = 0;
  check(cudaSetDevice(device.index));
  check(cudaDeviceGetAttribute(&cache_bytes, cudaDevAttrL2CacheSize, device.index));
  const std::size_t bytes = std::size_t{kCacheSizes} * static_cast<std::size_t>(cache_bytes);
  void* memory = nullptr;
  check(cudaMallocAsync(&memory, bytes, nullptr));
  check(cudaMemsetAsync(memory, 0, bytes, nullptr));
  check(cudaFreeAsync(memory, nullptr));
}

double time_on_device(Device device, const std::function<void()>& call) {
  check(cudaSetDevice(device.index));
  Event start;
  Event end;
  start.record();
  call();
  end.record();
  return end.seconds_since(start);
}

}  // namespace winnow::harness
