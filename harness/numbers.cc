// SPDX-License-Identifier: Apache-2.0
// Element types of the harness: one description of a floating-point format serves all of them.
#include "harness/numbers.h"

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>

namespace winnow::harness {
namespace {

struct Format {
  int bits;
  int mantissa_bits;
  int min_exponent;  // of normal numbers
  double step;       // the distance of subnormal numbers
  double largest;
  bool has_infinity;

  constexpr std::uint32_t sign_bit() const { return std::uint32_t{1} << (bits - 1); }
  constexpr std::uint32_t mantissa_mask() const { return (std::uint32_t{1} << mantissa_bits) - 1; }
  constexpr std::uint32_t last_exponent() const { return (sign_bit() >> mantissa_bits) - 1; }
};

constexpr Format kF32{32, 23, -126, 0x1p-149, 0x1.fffffep127, true};
constexpr Format kBf16{16, 7, -126, 0x1p-133, 0x1.fep127, true};
constexpr Format kF16{16, 10, -14, 0x1p-24, 65504, true};
constexpr Format kF8E4m3{8, 3, -6, 0x1p-9, 448, false};

constexpr int kDoubleBits = 52;  // stored mantissa bits
constexpr int kDoubleBias = 1023;

int exponent_of(double value) {
  return static_cast<int>(std::bit_cast<std::uint64_t>(value) >> kDoubleBits & 0x7ff) - kDoubleBias;
}

template <const Format& format>
double round_to(double value) {
  if (std::isnan(value)) return value;
  double result = value;
  if (exponent_of(value) < format.min_exponent) {
    result = std::nearbyint(value / format.step) * format.step;
  } else if (std::isfinite(value)) {
    constexpr int kDropped = kDoubleBits - format.mantissa_bits;
    auto bits = std::bit_cast<std::uint64_t>(value);
    // Just under a half, and the rest if the last kept bit is odd; a carry runs on into the
    // exponent.
    bits += (std::uint64_t{1} << (kDropped - 1)) - 1 + (bits >> kDropped & 1);
    result = std::bit_cast<double>(bits & ~((std::uint64_t{1} << kDropped) - 1));
  }
  if (std::abs(result) <= format.largest) return result;
  return std::copysign(
      format.has_infinity ? std::numeric_limits<double>::infinity() : format.largest, value);
}

template <const Format& format>
std::uint32_t code_of(double value) {
  const double x = round_to<format>(value);
  const std::uint32_t sign = std::signbit(x) ? format.sign_bit() : 0;
  constexpr std::uint32_t kLast = format.last_exponent() << format.mantissa_bits;
  if (std::isnan(x)) return sign | kLast | format.mantissa_mask();
  if (std::isinf(x)) return sign | kLast;
  const int exponent = exponent_of(x);
  if (exponent < format.min_exponent)
    return sign | static_cast<std::uint32_t>(std::abs(x) / format.step);
  const auto mantissa = static_cast<std::uint32_t>(std::bit_cast<std::uint64_t>(x) >>
                                                   (kDoubleBits - format.mantissa_bits));
  return sign |
         static_cast<std::uint32_t>(exponent - format.min_exponent + 1) << format.mantissa_bits |
         (mantissa & format.mantissa_mask());
}

template <const Format& format>
double value_of(std::uint32_t code) {
  const std::uint32_t exponent = code >> format.mantissa_bits & format.last_exponent();
  const std::uint32_t mantissa = code & format.mantissa_mask();
  const double sign = (code & format.sign_bit()) != 0 ? -1 : 1;
  if (exponent == format.last_exponent()) {
    if (format.has_infinity && mantissa == 0) return sign * std::numeric_limits<double>::infinity();
    if (format.has_infinity || mantissa == format.mantissa_mask())
      return std::numeric_limits<double>::quiet_NaN();
  }
  if (exponent == 0) return sign * (mantissa * format.step);
  constexpr int kRebias =
      format.min_exponent - 1 + kDoubleBias;  // positive: double reaches further
  const std::uint64_t double_exponent = exponent + std::uint64_t{kRebias};
  return sign *
         std::bit_cast<double>(double_exponent << kDoubleBits |
                               std::uint64_t{mantissa} << (kDoubleBits - format.mantissa_bits));
}

template <const Format& format, class Code>
void encode_as(std::span<const double> values, void* to) {
  auto* bytes = static_cast<std::byte*>(to);
  for (const double value : values) {
    const auto code = static_cast<Code>(code_of<format>(value));
    std::memcpy(bytes, &code, sizeof(Code));  // rows of a strided tensor need not be aligned
    bytes += sizeof(Code);
  }
}

template <const Format& format, class Code>
void decode_as(const void* from, std::span<double> values) {
  const auto* bytes = static_cast<const std::byte*>(from);
  for (double& value : values) {
    Code code;
    std::memcpy(&code, bytes, sizeof(Code));
    value = value_of<format>(code);
    bytes += sizeof(Code);
  }
}

[[noreturn]] void refuse(DType dtype) {
  throw std::logic_error("not a floating-point type: " + std::string(name(dtype)));
}

}  // namespace

double rounded(DType dtype, double value) {
  switch (dtype) {
    case DType::f32:
      return round_to<kF32>(value);
    case DType::bf16:
      return round_to<kBf16>(value);
    case DType::f16:
      return round_to<kF16>(value);
    case DType::f8_e4m3:
      return round_to<kF8E4m3>(value);
    case DType::f64:
      return value;
    case DType::i32:
      break;
  }
  refuse(dtype);
}

double smallest_normal(DType dtype) {
  switch (dtype) {
    case DType::f32:
    case DType::bf16:
      return 0x1p-126;
    case DType::f16:
      return 0x1p-14;
    case DType::f8_e4m3:
      return 0x1p-6;
    case DType::f64:
      return std::numeric_limits<double>::min();
    case DType::i32:
      break;
  }
  refuse(dtype);
}

void encode(DType dtype, std::span<const double> values, void* to) {
  switch (dtype) {
    case DType::f32:
      return encode_as<kF32, std::uint32_t>(values, to);
    case DType::bf16:
      return encode_as<kBf16, std::uint16_t>(values, to);
    case DType::f16:
      return encode_as<kF16, std::uint16_t>(values, to);
    case DType::f8_e4m3:
      return encode_as<kF8E4m3, std::uint8_t>(values, to);
    case DType::f64:
      if (!values.empty()) std::memcpy(to, values.data(), values.size_bytes());
      return;
    case DType::i32:
      break;
  }
  refuse(dtype);
}

void decode(DType dtype, const void* from, std::span<double> values) {
  switch (dtype) {
    case DType::f32:
      return decode_as<kF32, std::uint32_t>(from, values);
    case DType::bf16:
      return decode_as<kBf16, std::uint16_t>(from, values);
    case DType::f16:
      return decode_as<kF16, std::uint16_t>(from, values);
    case DType::f8_e4m3:
      return decode_as<kF8E4m3, std::uint8_t>(from, values);
    case DType::f64:
      if (!values.empty()) std::memcpy(values.data(), from, values.size_bytes());
      return;
    case DType::i32:
      break;
  }
  refuse(dtype);
}

}  // namespace winnow::harness
