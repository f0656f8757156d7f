// SPDX-License-Identifier: Apache-2.0
// What the machine's own matrix product reaches: the yardstick of every speed.
#pragma once

#include <optional>
#include <string>

#include "winnow/tensor.h"

namespace winnow::tools {

struct MatrixProduct {
  double flops_per_second;
  std::string what;  // "sgemm 3072^3 of OpenBLAS on 2 threads"
};

/// Measures it. Empty where there is none: OpenBLAS and cuBLAS are opened at run time.
std::optional<MatrixProduct> matrix_product(Device device, int threads);

}  // namespace winnow::tools
