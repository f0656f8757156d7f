// SPDX-License-Identifier: Apache-2.0
// Softmax and log-sum-exp, in which a logit of -inf means that there is no key.
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

/// The softmax of logits s. The largest and the sum relative to it are kept apart: in their lse the
/// sum would be lost if the logits are large.
class Softmax {
 public:
  explicit Softmax(std::span<const double> s) {
    for (const double value : s) largest_ = std::max(largest_, value);
    for (const double value : s) {
      if (value != kMinusInfinity) sum_ += std::exp(value - largest_);
    }
  }

  /// log sum_j exp(s_j); -inf if s is empty or all of it is -inf.
  double lse() const { return largest_ + std::log(sum_); }
  /// exp(s) / sum_j exp(s_j), as its logarithm.
  double log_probability(double s) const { return (s - largest_) - std::log(sum_); }
  /// exp(s) / (sum_j exp(s_j) + exp(sink)).
  double probability(double s, double sink) const {
    if (s == kMinusInfinity) return 0;
    return std::exp(s - largest_) / (sum_ + std::exp(sink - largest_));
  }

 private:
  double largest_ = kMinusInfinity;
  double sum_ = 0;  // sum_j exp(s_j - largest)
};

/// exp(s - log_sum), but at most 1: a given log_sum may have been rounded to fp32, which for large
/// logits leaves it far below s. 0 for s = -inf, where the difference may be NaN.
inline double probability(double s, double log_sum) {
  return s == kMinusInfinity ? 0 : std::exp(std::min(s - log_sum, 0.0));
}

}  // namespace winnow::reference
