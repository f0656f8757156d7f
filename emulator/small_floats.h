// SPDX-License-Identifier: Apache-2.0
// Numbers of 16 and 8 bits: bf16, f16 and fp8 (e4m3).
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace winnow::emulator {

inline float from_bf16(std::uint16_t bits) {
  return std::bit_cast<float>(std::uint32_t{bits} << 16);
}
inline std::uint16_t to_bf16(float x) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(x);
  if (x != x) return 0x7fff;  // as the device
  return static_cast<std::uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline float from_f16(std::uint16_t bits) {
  _Float16 half;
  std::memcpy(&half, &bits, sizeof half);
  return static_cast<float>(half);
}
inline std::uint16_t to_f16(float x) {
  if (x != x) return 0x7fff;
  const auto half = static_cast<_Float16>(x);
  std::uint16_t bits;
  std::memcpy(&bits, &half, sizeof bits);
  return bits;
}

inline float from_e4m3(std::uint8_t bits) {
  const float sign = bits & 0x80 ? -1.0f : 1.0f;
  const int exponent = (bits >> 3) & 15;
  const int mantissa = bits & 7;
  if (exponent == 15 && mantissa == 7) return std::nanf("");
  if (exponent == 0) return sign * std::ldexp(static_cast<float>(mantissa), -9);
  return sign * std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
}
/// To the nearest, ties to even; beyond 448 to 448.
inline std::uint8_t to_e4m3(float x) {
  if (x != x) return 0x7f;
  const std::uint8_t sign = std::signbit(x) ? 0x80 : 0;
  const float size = std::fabs(x);
  if (size >= 448) return sign | 0x7e;
  int exponent = 0;
  std::frexp(size, &exponent);                             // size = m * 2^exponent, m in [0.5, 1)
  const int quantum = size < 0x1p-6f ? -9 : exponent - 4;  // of 3 bits behind the first
  const int steps = static_cast<int>(std::nearbyint(std::ldexp(size, -quantum)));
  if (quantum == -9 && steps < 8) return sign | static_cast<std::uint8_t>(steps);
  int biased = quantum + 10;
  int mantissa = steps;
  if (mantissa == 16) {
    mantissa = 8;
    ++biased;
  }
  return sign | static_cast<std::uint8_t>(biased << 3 | (mantissa - 8));
}

}  // namespace winnow::emulator
