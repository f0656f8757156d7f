// SPDX-License-Identifier: Apache-2.0
// Whether kernels that multiply pairs of bf16 can run.
#pragma once

#include <initializer_list>
#include <string>

#include "winnow/tensor.h"

namespace winnow::cpu {

/// Whether this machine does.
bool can_multiply_pairs();

/// Empty, or why a kernel for inputs of the types `taken` cannot take this one, or not on this
/// machine.
std::string why_not_pairs_of(DType dtype, std::initializer_list<DType> taken = {DType::bf16});

}  // namespace winnow::cpu
