// SPDX-License-Identifier: Apache-2.0
// Execution: where and how a call runs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

struct CUstream_st;  // cudaStream_t without its header

namespace winnow {

enum class Backend : std::int32_t { automatic, reference, cpu, cuda };

struct Execution {
  Backend backend = Backend::automatic;  // automatic: the fastest for the tensors' device
  CUstream_st* stream = nullptr;         // cuda only; null: the default stream
  /// On the tensors' device, aligned to 16 bytes; null: allocated by the call.
  void* workspace = nullptr;
  std::size_t workspace_bytes = 0;  // size of `workspace`
  /// Upper bound of the workspace of a call. 0 is a bound like any other, not the default.
  std::size_t workspace_limit = std::size_t{256} << 20;
  /// CPU backends only; 0: the CPUs that the process may run on (its affinity). The quota of a
  /// container is not read: set this where it is smaller. Results do not depend on it.
  std::int32_t threads = 0;
  bool deterministic = false;    // backward: bitwise reproducible, at some cost
  const char* kernel = nullptr;  // name of the kernel to run; null: the best one that can
  /// Allocates the workspace if none is given. Called at most once per call, and only if the call
  /// needs a workspace; the memory must be on the device of the tensors, aligned to 16 bytes, and
  /// stay valid until the work of the call on its stream is done. The library does not free it. A
  /// null result means out of memory. Without an allocator the call allocates and frees its own.
  void* (*allocate)(void* context, std::size_t bytes) = nullptr;
  void* allocate_context = nullptr;  // passed to `allocate`
};

std::string_view name(Backend backend);
/// Throws Error if `name` is not the name of a backend.
Backend backend_from_name(std::string_view name);

/// Empty if the backend is in this build and usable on this machine, else the reason why not.
std::string why_not(Backend backend);
/// What a usable backend runs on, to be displayed: "AVX3_ZEN4 on 2 threads", "NVIDIA H200 (sm_90)".
std::string describe(Backend backend);

}  // namespace winnow
