// SPDX-License-Identifier: Apache-2.0
// Whether kernels that multiply pairs of bf16 can run.
#pragma once

#include <initializer_list>
#include <string>

#include "backend_operators.h"
#include "winnow/tensor.h"

namespace winnow::cpu {

/// Whether this machine can run them on the SIMD target that is chosen.
bool can_multiply_pairs();

/// Empty, or why a kernel for inputs of the types `taken` cannot take this one, or not on this
/// machine.
std::string why_not_pairs_of(DType dtype, std::initializer_list<DType> taken = {DType::bf16});

/// Whether the operator has such a kernel for a call. All of its kernels take the memory that this
/// one needs, so that the workspace limit does not choose between them.
template <class Args>
bool may_have_pairs(const Args& args) {
  return why_not_pairs(args).empty();
}

}  // namespace winnow::cpu
