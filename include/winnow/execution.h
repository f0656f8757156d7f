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
  void* workspace = nullptr;             // on the tensors' device; null: allocated by the call
  std::size_t workspace_bytes = 0;       // size of `workspace`
  std::size_t workspace_limit = std::size_t{256} << 20;  // upper bound of the workspace of a call
  std::int32_t threads = 0;      // CPU backends only; 0: all. Results do not depend on it
  bool deterministic = false;    // backward: bitwise reproducible, at some cost
  const char* kernel = nullptr;  // the name of the kernel that must run; null: the best that can
  /// Makes the workspace where none is given: asked at most once a call, for the device of its
  /// tensors and its stream, and only where the call needs one. The memory, aligned to 16 bytes,
  /// must live until the work of the call on the stream is done; nobody gives it back. Null for
  /// memory that cannot be had. Without an allocator the call takes and frees memory of its own.
  void* (*allocate)(void* context, std::size_t bytes) = nullptr;
  void* allocate_context = nullptr;  // handed to `allocate`
};

std::string_view name(Backend backend);
/// Throws Error if `name` is not the name of a backend.
Backend backend_from_name(std::string_view name);

/// Empty if the backend is in this build and usable on this machine, else the reason why not.
std::string why_not(Backend backend);
/// What a usable backend runs on, to be displayed: "AVX3_ZEN4 on 2 threads", "NVIDIA H200 (sm_90)".
std::string describe(Backend backend);

}  // namespace winnow
