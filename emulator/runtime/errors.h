// SPDX-License-Identifier: Apache-2.0
// Errors of the runtime: thrown as Failure inside of it, returned and remembered at its surface.
#pragma once

#include <exception>
#include <new>
#include <string>

#include <cuda_runtime_api.h>

#include "emulator/gpu.h"

namespace winnow::emulator {

struct Failure {
  cudaError_t code;
};

[[noreturn]] inline void fail(cudaError_t code) { throw Failure{code}; }

inline void require(bool holds, cudaError_t otherwise = cudaErrorInvalidValue) {
  if (!holds) fail(otherwise);
}

/// What all calls return since a kernel failed; cudaSuccess while none has.
cudaError_t broken();
/// Writes the message of the first such kernel to stderr.
void break_device(cudaError_t code, const std::string& message);

/// The calling thread's last error, unless it is cudaSuccess. Returns it.
cudaError_t remember(cudaError_t code);

/// A call of the runtime: `body` throws what it returns, or is successful.
template <class Body>
cudaError_t call(Body&& body) {
  cudaError_t code = broken();
  if (code == cudaSuccess) {
    try {
      body();
      code = broken();  // the kernel may have run
    } catch (const Failure& failure) {
      code = failure.code;
    } catch (const std::bad_alloc&) {
      code = cudaErrorMemoryAllocation;
    } catch (const std::exception&) {
      code = cudaErrorUnknown;
    }
  }
  return remember(code);
}

}  // namespace winnow::emulator
