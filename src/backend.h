// SPDX-License-Identifier: Apache-2.0
// What a backend is: a table with why_not, workspace_bytes and run for each op.
#pragma once

#include <string>
#include <tuple>

#include "winnow/winnow.h"

namespace winnow {

/// The arguments have been checked; optional numbers have their defaults filled in; no tensor has a
/// batch dimension.
template <class Args>
struct Op {
  /// Empty, or why this backend cannot run a legal call.
  std::string (*why_not)(const Args&, const Execution&) = nullptr;
  std::size_t (*workspace_bytes)(const Args&, const Execution&) = nullptr;
  /// Null: the backend does not have this op. A workspace, if given, has at least workspace_bytes.
  void (*run)(const Args&, const Execution&) = nullptr;
};

using OpTable =
    std::tuple<Op<KeyWindows>, Op<WindowIndices>, Op<IndexTopkForward>, Op<IndexTopkBackward>,
               Op<SparseAttentionForward>, Op<SparseAttentionBackward>, Op<ValueProjectionForward>,
               Op<ValueProjectionBackward>, Op<IndexTarget>, Op<IndexLoss>,
               Op<DenseIndexLossForward>, Op<DenseIndexLossBackward>, Op<QuantizeFp8>>;

struct BackendTable {
  Backend backend;
  DeviceKind reaches;
  /// Empty, or why this machine cannot run the backend.
  std::string (*why_not)();
  std::string (*describe)();
  OpTable ops;
};

extern const BackendTable reference_backend;
extern const BackendTable cpu_backend;
/// Null in a build without CUDA.
const BackendTable* find_cuda_backend();

}  // namespace winnow
