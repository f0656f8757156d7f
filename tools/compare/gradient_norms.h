// SPDX-License-Identifier: Apache-2.0
// gradient_norms: the norms by which gradients are judged. Where the terms of a gradient cancel,
// its own norm says little about the error that rounding may leave.
#pragma once

#include <map>
#include <string>

#include "winnow/operators.h"

namespace winnow::dump {

/// By the names of outputs.
using Norms = std::map<std::string, double, std::less<>>;

// ||m|| of each gradient, m being the same sums over the magnitudes of their terms. The tensors are
// contiguous, in double on the host. Other operators have none.
Norms gradient_norms(const SparseAttentionBackward& args);
Norms gradient_norms(const IndexTopkBackward& args);
Norms gradient_norms(const ValueProjectionBackward& args);
template <class Args>
Norms gradient_norms(const Args&) {
  return {};
}

}  // namespace winnow::dump
