// SPDX-License-Identifier: Apache-2.0
// The operators of the cuda backend: for each the list of its kernels, best first. The list stands
// in the operator's folder; the last kernel takes every shape.
#pragma once

#include <cstddef>
#include <string>
#include <type_traits>

#include "backend.h"

namespace winnow::cuda {

// Everything that a kernel runs is enqueued on the stream of the Execution; nothing waits.
Kernels<KeyWindows> kernels(std::type_identity<KeyWindows>);
Kernels<WindowIndices> kernels(std::type_identity<WindowIndices>);
Kernels<IndexTopkForward> kernels(std::type_identity<IndexTopkForward>);
Kernels<IndexTopkBackward> kernels(std::type_identity<IndexTopkBackward>);
Kernels<SparseAttentionForward> kernels(std::type_identity<SparseAttentionForward>);
Kernels<SparseAttentionBackward> kernels(std::type_identity<SparseAttentionBackward>);
Kernels<ValueProjectionForward> kernels(std::type_identity<ValueProjectionForward>);
Kernels<ValueProjectionBackward> kernels(std::type_identity<ValueProjectionBackward>);
Kernels<IndexTarget> kernels(std::type_identity<IndexTarget>);
Kernels<IndexLoss> kernels(std::type_identity<IndexLoss>);
Kernels<DenseIndexLossForward> kernels(std::type_identity<DenseIndexLossForward>);
Kernels<DenseIndexLossBackward> kernels(std::type_identity<DenseIndexLossBackward>);
Kernels<QuantizeFp8> kernels(std::type_identity<QuantizeFp8>);

// For kernels that need no workspace, and for those that take every legal call.
template <class Args>
std::size_t no_workspace(const Args&, const Execution&) {
  return 0;
}
template <class Args>
std::string always_able(const Args&, const Execution&) {
  return {};
}

}  // namespace winnow::cuda
