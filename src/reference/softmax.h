// SPDX-License-Identifier: Apache-2.0
// log-sum-exp and softmax probabilities, in which a logit of -inf means that there is no key.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>

namespace winnow::reference {

inline constexpr double kMinusInfinity = -std::numeric_limits<double>::infinity();

/// log(exp(a) + exp(b)); NaN if a or b is NaN.
inline double log_add_exp(double a, double b) {
  if (std::isnan(b)) return b;
  const double larger = std::max(a, b);
  if (std::isinf(larger)) return larger;
  return larger + std::log1p(std::exp(std::min(a, b) - larger));
}

/// log sum_j exp(s_j); -inf if s is empty or all of it is -inf.
inline double log_sum_exp(std::span<const double> s) {
  double largest = kMinusInfinity;
  for (const double value : s) largest = std::max(largest, value);
  double sum = 0;
  for (const double value : s) {
    if (value != kMinusInfinity) sum += std::exp(value - largest);
  }
  return largest + std::log(sum);
}

/// exp(s - log_sum), and 0 for s = -inf, where the difference may be NaN.
inline double probability(double s, double log_sum) {
  return s == kMinusInfinity ? 0 : std::exp(s - log_sum);
}

}  // namespace winnow::reference
