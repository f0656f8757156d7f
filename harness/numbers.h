// SPDX-License-Identifier: Apache-2.0
// Element types of the harness: rounding, encoding and decoding, written apart from the library's
// own.
#pragma once

#include <span>

#include "winnow/tensor.h"

namespace winnow::harness {

/// The nearest value of the type, ties to even. Too large: infinity; f8_e4m3, which has none:
/// +-448.
double rounded(DType dtype, double value);

/// The smallest normal number of the type.
double smallest_normal(DType dtype);

/// Rounds the values and writes them to `to` as elements of a floating-point type.
void encode(DType dtype, std::span<const double> values, void* to);
void decode(DType dtype, const void* from, std::span<double> values);

}  // namespace winnow::harness
