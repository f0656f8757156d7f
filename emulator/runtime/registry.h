// SPDX-License-Identifier: Apache-2.0
// What host code has registered: kernels, by the addresses that it knows them by.
#pragma once

#include <atomic>
#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include <cuda_runtime_api.h>

#include "emulator/gpu.h"

namespace winnow::emulator {

/// A fat binary, whose PTX is read when something in it is first used.
class Binary {
 public:
  explicit Binary(const void* wrapper) : wrapper_(wrapper) {}

  // These fail if there is no PTX for the device, or it cannot be read, which is said on stderr.
  /// Fails if there is none.
  const Function& function(const std::string& name);
  /// Of the PTX; 90 for sm_90a.
  int capability();

 private:
  struct Decoded {
    const Function* function = nullptr;
    cudaError_t failure = cudaSuccess;
  };
  const Module& module();
  Decoded decode(const std::string& name);

  const void* wrapper_;
  std::mutex mutex_;  // of what follows
  std::unique_ptr<Module> module_;
  int capability_ = 0;
  cudaError_t failure_ = cudaSuccess;
  std::map<std::string, Decoded> functions_;
};

struct Kernel {
  Binary* binary = nullptr;
  std::string name;  // mangled
  /// Dynamic shared memory that cudaFuncSetAttribute has allowed, 0 if it was not called.
  std::atomic<std::size_t> allowed_shared_bytes = 0;

  const Function& function() const { return binary->function(name); }
  /// Shared memory that a launch may ask for.
  std::size_t most_dynamic_bytes() const;
};

/// Takes the address of the stub in host code, or a cudaKernel_t.
Kernel& find_kernel(const void* handle);

}  // namespace winnow::emulator
