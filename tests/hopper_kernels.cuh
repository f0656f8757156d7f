// SPDX-License-Identifier: Apache-2.0
// Runs the kernels of the tests of src/cuda/hopper: on Hopper only, one thread block, and with a
// watchdog if the kernel waits on barriers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include "tests/testing.h"

namespace winnow::tests {

inline constexpr Device kDevice{DeviceKind::cuda, 0};
inline constexpr int kWarpgroup = 128;

template <class T>
inline constexpr DType kDType = DType::f32;
template <>
inline constexpr DType kDType<__nv_bfloat16> = DType::bf16;
template <>
inline constexpr DType kDType<__half> = DType::f16;
template <>
inline constexpr DType kDType<__nv_fp8_e4m3> = DType::f8_e4m3;

/// Skips its tests on devices without the instructions of Hopper.
class OnHopper : public ::testing::Test {
 protected:
  void SetUp() override {
    const std::string reason = why_not(Backend::cuda);
    if (!reason.empty()) GTEST_SKIP() << "the cuda backend " << reason;
    int major = 0;
    int minor = 0;
    ASSERT_EQ(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, kDevice.index),
              cudaSuccess);
    ASSERT_EQ(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, kDevice.index),
              cudaSuccess);
    if (major != 9 || minor != 0) {
      GTEST_SKIP() << "needs compute capability 9.0, this is " << major << "." << minor;
    }
  }
};

/// Runs one thread block and waits for it.
template <class... Parameters, class... Arguments>
void run_block(void (*kernel)(Parameters...), int threads, std::size_t shared_bytes,
               Arguments&&... arguments) {
  ASSERT_EQ(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 static_cast<int>(shared_bytes)),
            cudaSuccess);
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(1);
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared_bytes;
  ASSERT_EQ(cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...), cudaSuccess);
  ASSERT_STREQ(cudaGetErrorString(cudaDeviceSynchronize()), "no error");
}

/// Traps if the threads of a block do not finish in time, so that a barrier that never completes
/// fails the test instead of hanging the device. It is in shared memory, and an additional warp
/// runs it.
class Watchdog {
 public:
  static constexpr int kThreads = 32;

  __device__ void init() { finished_ = 0; }
  /// Called by each watched thread at its end.
  __device__ void finish() { atomicAdd(&finished_, 1u); }
  __device__ void watch(unsigned threads) {
    constexpr std::uint64_t kLimit = 20'000'000'000;  // nanoseconds; sanitizers slow kernels down
    const std::uint64_t start = time();
    while (atomicAdd(&finished_, 0u) < threads) {
      if (time() - start > kLimit) __trap();
      __nanosleep(1000);
    }
  }

 private:
  __device__ static std::uint64_t time() {
    std::uint64_t nanoseconds;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(nanoseconds));
    return nanoseconds;
  }

  unsigned finished_;
};

}  // namespace winnow::tests
