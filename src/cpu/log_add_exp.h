// SPDX-License-Identifier: Apache-2.0
// The log of a sum of two exponentials, with which a sink joins the lse of the keys.
#pragma once

#include <algorithm>
#include <cmath>

namespace winnow::cpu {

/// log(exp(a) + exp(b)); NaN if a or b is NaN.
inline double log_add_exp(double a, double b) {
  if (std::isnan(b)) return b;
  const double larger = std::max(a, b);
  if (std::isinf(larger)) return larger;
  return larger + std::log1p(std::exp(std::min(a, b) - larger));
}

}  // namespace winnow::cpu
