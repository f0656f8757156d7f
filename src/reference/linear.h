// SPDX-License-Identifier: Apache-2.0
// The two inner loops of the reference backend.
#pragma once

#include <cstdint>
#include <span>

namespace winnow::reference {

/// sum_d a[d] * b[d]
double dot(std::span<const double> a, std::span<const double> b);
/// target += factor * source
void add_scaled(std::span<double> target, double factor, std::span<const double> source);

/// Row i of a contiguous matrix with `columns` columns.
template <class T>
std::span<T> row(std::span<T> matrix, std::int64_t i, std::int64_t columns) {
  return matrix.subspan(static_cast<std::size_t>(i * columns), static_cast<std::size_t>(columns));
}

}  // namespace winnow::reference
