// SPDX-License-Identifier: Apache-2.0
// Rows of any floating element type, read and written as double.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <span>

#include "winnow/tensor.h"

namespace winnow {

/// The row (last dimension) of `tensor` at the leading `index`.
void read_row(const Tensor& tensor, std::initializer_list<std::int64_t> index,
              std::span<double> row);
/// Rounds once, to nearest even.
void write_row(const Tensor& tensor, std::initializer_list<std::int64_t> index,
               std::span<const double> row);

double read(const Tensor& tensor, std::initializer_list<std::int64_t> index);
void write(const Tensor& tensor, std::initializer_list<std::int64_t> index, double value);

}  // namespace winnow
