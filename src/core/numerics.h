// SPDX-License-Identifier: Apache-2.0
// Element types with their rounding, and the order of top-k selection, for host and device code.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#ifdef __CUDACC__
#define WINNOW_HOST_DEVICE __host__ __device__
#else
#define WINNOW_HOST_DEVICE
#endif

namespace winnow {

struct BFloat16 {
  std::uint16_t bits;
};
struct Float16 {
  std::uint16_t bits;
};
struct Float8E4M3 {
  std::uint8_t bits;
};

inline constexpr float kFloat8Max = 448;

/// Rounds x to float with round-to-odd: of the two neighbours of an inexact x it takes the one with
/// the odd mantissa. Rounding the result to a narrower type then equals rounding x directly.
inline float round_to_odd(double x) {
  const float nearest = static_cast<float>(x);
  if (!std::isfinite(nearest)) {
    if (std::isfinite(x)) return std::copysign(std::numeric_limits<float>::max(), nearest);
    return nearest;
  }
  const auto bits = std::bit_cast<std::uint32_t>(nearest);
  if (static_cast<double>(nearest) == x || (bits & 1u) != 0) return nearest;
  const bool away = std::fabs(static_cast<double>(nearest)) < std::fabs(x);
  return std::bit_cast<float>(away ? bits + 1 : bits - 1);
}

/// bits >> shift, rounded to nearest even.
WINNOW_HOST_DEVICE constexpr std::uint32_t shift_right_rounding(std::uint32_t bits, int shift) {
  const std::uint32_t half = (std::uint32_t{1} << (shift - 1)) - 1;
  return (bits + half + ((bits >> shift) & 1u)) >> shift;
}

WINNOW_HOST_DEVICE inline float to_float(BFloat16 x) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(x.bits) << 16);
}

WINNOW_HOST_DEVICE inline BFloat16 to_bfloat16(float x) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) {
    return {static_cast<std::uint16_t>((bits >> 16) | 0x40u)};  // NaN stays NaN
  }
  return {static_cast<std::uint16_t>(shift_right_rounding(bits, 16))};
}

/// Rounds |x|, given by its fp32 bits, to a format of `exponent_bits` and `mantissa_bits`; returns
/// the bits without a sign. A result above `max`, the largest finite value, becomes `overflow`.
WINNOW_HOST_DEVICE constexpr std::uint32_t narrow(std::uint32_t magnitude, int exponent_bits,
                                                  int mantissa_bits, std::uint32_t max,
                                                  std::uint32_t overflow) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int shift = 23 - mantissa_bits;
  const int exponent = static_cast<int>(magnitude >> 23) - 127 + bias;
  std::uint32_t result = 0;
  if (exponent > 0) {
    const std::uint32_t rebiased = magnitude - (static_cast<std::uint32_t>(127 - bias) << 23);
    result = shift_right_rounding(rebiased, shift);
  } else if (shift + 1 - exponent < 32) {  // denormal in the narrow format
    const std::uint32_t mantissa =
        (magnitude & 0x7fffffu) | (magnitude >> 23 != 0 ? 0x800000u : 0u);
    result = shift_right_rounding(mantissa, shift + 1 - exponent);
  }
  return result > max ? overflow : result;
}

WINNOW_HOST_DEVICE inline Float16 to_float16(float x) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return {static_cast<std::uint16_t>(sign | 0x7e00u)};
  return {static_cast<std::uint16_t>(sign | narrow(magnitude, 5, 10, 0x7bffu, 0x7c00u))};
}

/// Saturates at kFloat8Max, since e4m3 has no infinity.
WINNOW_HOST_DEVICE inline Float8E4M3 to_float8(float x) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  const std::uint32_t sign = (bits >> 24) & 0x80u;
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return {static_cast<std::uint8_t>(sign | 0x7fu)};
  return {static_cast<std::uint8_t>(sign | narrow(magnitude, 4, 3, 0x7eu, 0x7eu))};
}

WINNOW_HOST_DEVICE inline float to_float(Float16 x) {
  const std::uint32_t sign = static_cast<std::uint32_t>(x.bits & 0x8000u) << 16;
  const std::uint32_t exponent = (x.bits >> 10) & 31u;
  const std::uint32_t mantissa = x.bits & 0x3ffu;
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000u | (mantissa << 13));
  if (exponent != 0)
    return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
  const float denormal = static_cast<float>(mantissa) * 0x1p-24f;
  return sign != 0 ? -denormal : denormal;
}

WINNOW_HOST_DEVICE inline float to_float(Float8E4M3 x) {
  const std::uint32_t sign = static_cast<std::uint32_t>(x.bits & 0x80u) << 24;
  const std::uint32_t exponent = (x.bits >> 3) & 15u;
  const std::uint32_t mantissa = x.bits & 7u;
  if (exponent == 15 && mantissa == 7) return std::bit_cast<float>(sign | 0x7fc00000u);
  if (exponent != 0)
    return std::bit_cast<float>(sign | ((exponent + 120) << 23) | (mantissa << 20));
  const float denormal = static_cast<float>(mantissa) * 0x1p-9f;
  return sign != 0 ? -denormal : denormal;
}

inline double to_double(double x) { return x; }
inline double to_double(float x) { return x; }
inline double to_double(BFloat16 x) { return to_float(x); }
inline double to_double(Float16 x) { return to_float(x); }
inline double to_double(Float8E4M3 x) { return to_float(x); }

/// Converts with a single rounding, to nearest even.
template <class T>
T from_double(double x);
template <>
inline double from_double<double>(double x) {
  return x;
}
template <>
inline float from_double<float>(double x) {
  return static_cast<float>(x);
}
template <>
inline BFloat16 from_double<BFloat16>(double x) {
  return to_bfloat16(round_to_odd(x));
}
template <>
inline Float16 from_double<Float16>(double x) {
  return to_float16(round_to_odd(x));
}
template <>
inline Float8E4M3 from_double<Float8E4M3>(double x) {
  return to_float8(round_to_odd(x));
}

/// The order of top-k selection: larger scores first; equal scores (+0 equals -0) by smaller key
/// index. Callers drop NaN and -inf beforehand, which are never selected.
template <class Score>
WINNOW_HOST_DEVICE constexpr bool selected_before(Score a_score, std::int32_t a_key, Score b_score,
                                                  std::int32_t b_key) {
  return a_score != b_score ? a_score > b_score : a_key < b_key;
}

}  // namespace winnow
