// SPDX-License-Identifier: Apache-2.0
// The list of all operators, from which backends, bindings, tools and tests are derived.
#pragma once

#include <tuple>
#include <type_traits>

#include "winnow/index_loss.h"
#include "winnow/index_topk.h"
#include "winnow/key_windows.h"
#include "winnow/quantize_fp8.h"
#include "winnow/sparse_attention.h"
#include "winnow/value_projection.h"
#include "winnow/window_indices.h"

namespace winnow {

/// The argument structs of all operators.
using Operators = std::tuple<KeyWindows, WindowIndices, IndexTopkForward, IndexTopkBackward,
                             SparseAttentionForward, SparseAttentionBackward,
                             ValueProjectionForward, ValueProjectionBackward, IndexTarget,
                             IndexLoss, DenseIndexLossForward, DenseIndexLossBackward, QuantizeFp8>;

/// Calls visit(std::type_identity<Args>()) for every operator, in the order of the list.
template <class Visitor>
constexpr void for_each_operator(Visitor&& visit) {
  [&]<class... Args>(std::type_identity<std::tuple<Args...>>) {
    (visit(std::type_identity<Args>()), ...);
  }(std::type_identity<Operators>());
}

/// Calls visit(field) for every field of an argument struct, in the order of its members.
template <Arguments Args, class Visitor>
constexpr void for_each_field(Visitor&& visit) {
  std::apply([&](const auto&... field) { (visit(field), ...); }, Args::fields());
}

}  // namespace winnow
