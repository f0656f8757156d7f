// SPDX-License-Identifier: Apache-2.0
// The errors of the device and of each thread.
#include "emulator/runtime/errors.h"

#include <atomic>
#include <cstdio>
#include <utility>

namespace winnow::emulator {
namespace {

std::atomic<cudaError_t> device_error = cudaSuccess;
thread_local cudaError_t last_error = cudaSuccess;

}  // namespace

cudaError_t broken() { return device_error.load(); }

void break_device(cudaError_t code, const std::string& message) {
  cudaError_t whole = cudaSuccess;
  if (device_error.compare_exchange_strong(whole, code)) {
    std::fprintf(stderr, "emulated GPU: %s\n", message.c_str());
  }
}

cudaError_t remember(cudaError_t code) {
  if (code != cudaSuccess) last_error = code;
  return code;
}

}  // namespace winnow::emulator

using namespace winnow::emulator;

cudaError_t cudaPeekAtLastError() { return broken() != cudaSuccess ? broken() : last_error; }

cudaError_t cudaGetLastError() {
  const cudaError_t code = std::exchange(last_error, cudaSuccess);
  return broken() != cudaSuccess ? broken() : code;
}
