// SPDX-License-Identifier: Apache-2.0
// What a backend is: for every operator a list of kernels, best first.
#pragma once

#include <span>
#include <string>
#include <tuple>
#include <type_traits>

#include "winnow/winnow.h"

namespace winnow {

/// One way to run an operator. The arguments have been checked; optional numbers have their
/// defaults filled in; no tensor has a batch dimension.
template <class Args>
struct Kernel {
  const char* name = nullptr;  // unique among the operator's kernels of a backend
  /// Empty, or why this kernel cannot run a legal call. The answer depends on types, heads,
  /// dimensions, topk, strides, options and the device, never on the numbers of rows, unless
  /// the workspace limit is too small for them.
  std::string (*why_not)(const Args&, const Execution&) = nullptr;
  std::size_t (*workspace_bytes)(const Args&, const Execution&) = nullptr;
  /// A workspace, if given, has at least workspace_bytes.
  void (*run)(const Args&, const Execution&) = nullptr;
};

// For kernels that need no workspace, and for those that take every legal call.
template <class Args>
std::size_t no_workspace(const Args&, const Execution&) {
  return 0;
}
template <class Args>
std::string always_able(const Args&, const Execution&) {
  return {};
}

template <class Args>
using Kernels = std::span<const Kernel<Args>>;

/// For every operator a function that gives its kernels; none: the backend does not have it.
template <class List>
struct KernelTableOf;
template <class... Args>
struct KernelTableOf<std::tuple<Args...>> {
  using Type = std::tuple<Kernels<Args> (*)()...>;

  /// The table of a backend whose kernels Source::kernels<Args>() gives.
  template <class Source>
  static constexpr Type from() {
    return {Source::template kernels<Args>...};
  }
};
using KernelTable = KernelTableOf<Operators>::Type;

template <class Source>
constexpr KernelTable kernel_table() {
  return KernelTableOf<Operators>::from<Source>();
}

struct BackendTable {
  Backend backend;
  /// Empty, or why this machine cannot run the backend.
  std::string (*why_not)();
  /// Empty, or why the backend cannot run on this device, of the kind that it takes.
  std::string (*why_not_device)(Device device);
  std::string (*describe)();
  KernelTable kernels;
};

template <class Args>
Kernels<Args> kernels_of(const BackendTable& table) {
  return std::get<Kernels<Args> (*)()>(table.kernels)();
}

extern const BackendTable reference_backend;
extern const BackendTable cpu_backend;
/// Null in a build without CUDA.
const BackendTable* find_cuda_backend();

}  // namespace winnow
