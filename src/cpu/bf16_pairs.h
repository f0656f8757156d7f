// SPDX-License-Identifier: Apache-2.0
// Whether kernels that multiply pairs of bf16 can run.
#pragma once

#include <string>

#include "winnow/tensor.h"

namespace winnow::cpu {

/// Empty, or why such kernels cannot take inputs of this type, or not on this machine.
std::string why_not_pairs_of(DType dtype);

}  // namespace winnow::cpu
