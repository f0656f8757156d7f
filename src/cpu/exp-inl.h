// SPDX-License-Identifier: Apache-2.0
// exp of a vector of floats, accurate to about 1 ulp. Included once per SIMD target.
#include <cstdint>
#include <limits>

#include <hwy/highway.h>

#include "cpu/simd.h"

#if defined(WINNOW_CPU_EXP_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef WINNOW_CPU_EXP_INL_H_
#undef WINNOW_CPU_EXP_INL_H_
#else
#define WINNOW_CPU_EXP_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace winnow::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

/// exp(x), flushed to 0 where it would be below 2^-125. NaN stays NaN.
template <class D>
HWY_INLINE hn::Vec<D> exp(D d, hn::Vec<D> x) {
  // Range reduction: x = n log 2 + r with |r| <= log(2) / 2. log 2 is split in two, so that the
  // product of n with its upper part is exact.
  const auto n = hn::Round(hn::Mul(x, hn::Set(d, 1.44269504f)));
  auto r = hn::NegMulAdd(n, hn::Set(d, 0x1.62e4p-1f), x);
  r = hn::NegMulAdd(n, hn::Set(d, 0x1.7f7d1cp-20f), r);

  // Taylor series of exp(r); the first omitted term is below 2^-27.
  auto y = hn::MulAdd(r, hn::Set(d, 1.0f / 5040), hn::Set(d, 1.0f / 720));
  y = hn::MulAdd(r, y, hn::Set(d, 1.0f / 120));
  y = hn::MulAdd(r, y, hn::Set(d, 1.0f / 24));
  y = hn::MulAdd(r, y, hn::Set(d, 1.0f / 6));
  y = hn::MulAdd(r, y, hn::Set(d, 0.5f));
  y = hn::MulAdd(hn::Mul(r, r), y, hn::Add(r, hn::Set(d, 1.0f)));

  // Scales by 2 * 2^(n - 1), since 2^128 is not a float.
  const hn::RebindToSigned<D> i32;
  const auto exponent = hn::Add(hn::ConvertTo(i32, n), hn::Set(i32, 126));
  const auto power = hn::BitCast(d, hn::ShiftLeft<23>(exponent));
  y = hn::Mul(hn::Mul(y, hn::Set(d, 2.0f)), power);

  y = hn::IfThenElse(hn::Gt(x, hn::Set(d, 88.72283f)),
                     hn::Set(d, std::numeric_limits<float>::infinity()), y);
  return hn::IfThenZeroElse(hn::Lt(x, hn::Set(d, -86.643f)), y);
}

/// exp(x) of x = logit - lse, and 1 where x is above 0: lse, rounded to fp32, may be far below the
/// logit where both are large. NaN stays NaN.
template <class D>
HWY_INLINE hn::Vec<D> probability(D d, hn::Vec<D> x) {
  return exp(d, hn::IfThenZeroElse(hn::Gt(x, hn::Zero(d)), x));
}

}  // namespace winnow::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
