// SPDX-License-Identifier: Apache-2.0
// Reads and writes rows of any floating-point type as double.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <span>

#include "winnow/tensor.h"

namespace winnow {

/// Reads the row (last dimension) of `tensor` at `index` of its leading dimensions.
void read_row(const Tensor& tensor, std::initializer_list<std::int64_t> index,
              std::span<double> row);
/// Writes such a row, rounding each element once, to nearest even.
void write_row(const Tensor& tensor, std::initializer_list<std::int64_t> index,
               std::span<const double> row);

double read(const Tensor& tensor, std::initializer_list<std::int64_t> index);
void write(const Tensor& tensor, std::initializer_list<std::int64_t> index, double value);

}  // namespace winnow
