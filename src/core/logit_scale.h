// SPDX-License-Identifier: Apache-2.0
// The scale of attention logits, split so that differences of logits stay exact.
#pragma once

#include <cmath>

namespace winnow {

/// scale = power * rest, where |power| is a power of two and 1 <= rest < 2. Products q.k times
/// `power` are exact, are ordered like their logits and overflow only if those do. The difference
/// of two that are close is exact too; that of two rounded logits is off by |logit| 2^-24, which
/// for large logits is far more than the difference itself.
struct LogitScale {
  float power;
  float rest;

  explicit LogitScale(float scale)
      : power(std::copysign(std::ldexp(1.0F, std::ilogb(scale)), scale)), rest(scale / power) {}
};

}  // namespace winnow
