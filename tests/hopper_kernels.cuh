// SPDX-License-Identifier: Apache-2.0
// How the tests of src/cuda/hopper run a kernel: on Hopper only, one thread block, and with a
// watchdog where the kernel waits for barriers.
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

/// Skips its tests on every device that has not Hopper's instructions.
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

/// Ends the launch with an error when the threads of a block do not finish, so that a barrier that
/// never completes fails a test and does not hang the device. It is part of the shared memory; one
/// more warp than the kernel needs does the watching.
class Watchdog {
 public:
  static constexpr int kThreads = 32;

  __device__ void init() { finished_ = 0; }
  /// The last thing that each of the watched threads does.
  __device__ void finish() { atomicAdd(&finished_, 1u); }
  __device__ void watch(unsigned threads) {
    constexpr std::uint64_t kLimit = 20'000'000'000;  // nanoseconds; a sanitizer slows kernels down
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
