// SPDX-License-Identifier: Apache-2.0
// Element types: every value of the narrow formats, and the rounding of doubles to them.
#include "core/numerics.h"

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "harness/numbers.h"
#include "tests/testing.h"

namespace winnow::tests {
namespace {

/// The parameters of a format, from its standard.
struct BFloat16Format {
  using Type = BFloat16;
  static constexpr DType dtype = DType::bf16;
  static constexpr std::uint32_t codes = 0x8000;  // without sign
  static constexpr std::uint32_t largest_finite = 0x7f7f;
  static constexpr double largest = 0x1.fep127;
  static constexpr double smallest = 0x1p-133;
  static constexpr double overflow = std::numeric_limits<double>::infinity();
  static BFloat16 from_float(float x) { return to_bfloat16(x); }
};
struct Float16Format {
  using Type = Float16;
  static constexpr DType dtype = DType::f16;
  static constexpr std::uint32_t codes = 0x8000;
  static constexpr std::uint32_t largest_finite = 0x7bff;
  static constexpr double largest = 65504;
  static constexpr double smallest = 0x1p-24;
  static constexpr double overflow = std::numeric_limits<double>::infinity();
  static Float16 from_float(float x) { return to_float16(x); }
};
struct Float8Format {
  using Type = Float8E4M3;
  static constexpr DType dtype = DType::f8_e4m3;
  static constexpr std::uint32_t codes = 0x80;
  static constexpr std::uint32_t largest_finite = 0x7e;
  static constexpr double largest = 448;
  static constexpr double smallest = 0x1p-9;
  static constexpr double overflow = 448;
  static Float8E4M3 from_float(float x) { return to_float8(x); }
};

template <class Format>
typename Format::Type coded(std::uint32_t code) {
  return {static_cast<decltype(Format::Type::bits)>(code)};
}

template <class Format>
class SmallFormat : public ::testing::Test {};
using Formats = ::testing::Types<BFloat16Format, Float16Format, Float8Format>;
TYPED_TEST_SUITE(SmallFormat, Formats);

TYPED_TEST(SmallFormat, EveryValueSurvivesARoundTrip) {
  for (std::uint32_t code = 0; code < 2 * TypeParam::codes; ++code) {
    const auto x = coded<TypeParam>(code);
    const float value = to_float(x);
    if (std::isnan(value)) {
      EXPECT_TRUE(std::isnan(to_float(TypeParam::from_float(value)))) << code;
      continue;
    }
    EXPECT_EQ(TypeParam::from_float(value).bits, x.bits);
    EXPECT_EQ(from_double<typename TypeParam::Type>(value).bits, x.bits);
    EXPECT_EQ(to_double(x), value);
  }
}

TYPED_TEST(SmallFormat, CodesAscendFromZeroToTheLargest) {
  EXPECT_EQ(to_float(coded<TypeParam>(0)), 0);
  EXPECT_EQ(to_float(coded<TypeParam>(1)), TypeParam::smallest);
  EXPECT_EQ(to_float(coded<TypeParam>(TypeParam::largest_finite)), TypeParam::largest);
  for (std::uint32_t code = 1; code <= TypeParam::largest_finite; ++code) {
    EXPECT_LT(to_float(coded<TypeParam>(code - 1)), to_float(coded<TypeParam>(code)));
    EXPECT_EQ(to_float(coded<TypeParam>(code | TypeParam::codes)),
              -to_float(coded<TypeParam>(code)));
  }
  for (std::uint32_t code = TypeParam::largest_finite + 1; code < TypeParam::codes; ++code)
    EXPECT_FALSE(std::isfinite(to_float(coded<TypeParam>(code))));
}

TYPED_TEST(SmallFormat, BetweenTwoValuesTheNearestWinsAndTiesGoToEven) {
  using Type = typename TypeParam::Type;
  for (std::uint32_t code = 0; code < TypeParam::largest_finite; ++code) {
    const double low = to_double(coded<TypeParam>(code));
    const double high = to_double(coded<TypeParam>(code + 1));
    const double middle = low + (high - low) / 2;  // exact in double, and in float
    const std::uint32_t even = code % 2 == 0 ? code : code + 1;
    for (const std::uint32_t sign : {0U, TypeParam::codes}) {
      const double s = sign == 0 ? 1 : -1;
      EXPECT_EQ(from_double<Type>(s * middle).bits, even | sign);
      EXPECT_EQ(TypeParam::from_float(static_cast<float>(s * middle)).bits, even | sign);
      // Doubles that round to the middle in fp32, so that double rounding would show.
      EXPECT_EQ(from_double<Type>(s * std::nextafter(middle, high)).bits, (code + 1) | sign);
      EXPECT_EQ(from_double<Type>(s * std::nextafter(middle, low)).bits, code | sign);
    }
  }
}

TYPED_TEST(SmallFormat, TooLargeOverflowsOrSaturates) {
  using Type = typename TypeParam::Type;
  const double largest = TypeParam::largest;
  const double step = largest - to_double(coded<TypeParam>(TypeParam::largest_finite - 1));
  const double border = largest + step / 2;
  EXPECT_EQ(to_double(from_double<Type>(std::nextafter(border, 0.0))), largest);
  for (const double x : {border, 2 * largest, 1e300, kInfinity}) {
    EXPECT_EQ(to_double(from_double<Type>(x)), TypeParam::overflow) << x;
    EXPECT_EQ(to_double(from_double<Type>(-x)), -TypeParam::overflow) << x;
  }
  EXPECT_EQ(to_float(TypeParam::from_float(std::numeric_limits<float>::infinity())),
            TypeParam::overflow);
  EXPECT_EQ(to_float(TypeParam::from_float(std::numeric_limits<float>::max())),
            TypeParam::overflow);
}

TYPED_TEST(SmallFormat, TooSmallBecomesZeroWithItsSign) {
  using Type = typename TypeParam::Type;
  const double half = TypeParam::smallest / 2;
  EXPECT_EQ(from_double<Type>(half).bits, 0);
  EXPECT_EQ(from_double<Type>(std::nextafter(half, 1.0)).bits, 1);
  for (const double x : {half, 1e-300, 0x1p-149, 0x1p-1074, 0.0}) {
    EXPECT_EQ(from_double<Type>(x).bits, 0) << x;
    EXPECT_EQ(from_double<Type>(-x).bits, TypeParam::codes) << x;
  }
}

TYPED_TEST(SmallFormat, NanStaysNan) {
  using Type = typename TypeParam::Type;
  EXPECT_TRUE(std::isnan(to_float(from_double<Type>(kNaN))));
  EXPECT_TRUE(std::isnan(to_float(from_double<Type>(-kNaN))));
  // NaN payloads in any bit, including the lowest alone.
  for (int bit = 0; bit < 23; ++bit) {
    const auto nan = std::bit_cast<float>(0x7f800000U | std::uint32_t{1} << bit);
    EXPECT_TRUE(std::isnan(to_float(TypeParam::from_float(nan)))) << bit;
    EXPECT_TRUE(std::isnan(to_float(TypeParam::from_float(-nan)))) << bit;
  }
}

TYPED_TEST(SmallFormat, TheHarnessRoundsAlike) {
  const Random random(1, "doubles");
  for (int i = 0; i < 200000; ++i) {
    // Any sign and mantissa; exponents from far below the format to far above it.
    const std::uint64_t word = random.bits(i);
    const std::uint64_t exponent = 1023 - 160 + (word >> 1) % 320;
    const auto x = std::bit_cast<double>((word & 0x800fffffffffffffU) | exponent << 52);
    ASSERT_EQ(to_double(from_double<typename TypeParam::Type>(x)),
              harness::rounded(TypeParam::dtype, x))
        << x;
  }
}

TEST(RoundToOdd, KeepsFloatsAndMarksTheRest) {
  for (const float x : {0.0F, -0.0F, 1.0F, -2.5F, 0x1p-149F, std::numeric_limits<float>::max(),
                        std::numeric_limits<float>::infinity()})
    EXPECT_EQ(std::bit_cast<std::uint32_t>(round_to_odd(x)), std::bit_cast<std::uint32_t>(x));
  const Random random(2, "doubles");
  for (int i = 0; i < 100000; ++i) {
    const double x =
        random.normal(i) * std::ldexp(1.0, static_cast<int>(random.below(-i, 300)) - 150);
    const float odd = round_to_odd(x);
    if (static_cast<double>(odd) == x) continue;
    ASSERT_EQ(std::bit_cast<std::uint32_t>(odd) & 1U, 1U) << x;
    // One of the two floats around x.
    const double below = std::nextafter(odd, -std::numeric_limits<float>::infinity());
    const double above = std::nextafter(odd, std::numeric_limits<float>::infinity());
    ASSERT_TRUE(below < x && x < above) << x;
  }
  EXPECT_EQ(round_to_odd(1e300), std::numeric_limits<float>::max());
  EXPECT_EQ(round_to_odd(-1e300), std::numeric_limits<float>::lowest());
}

TEST(SelectedBefore, IsLargerScoreThenSmallerKey) {
  EXPECT_TRUE(selected_before(2.0F, 9, 1.0F, 3));
  EXPECT_FALSE(selected_before(1.0F, 3, 2.0F, 9));
  EXPECT_TRUE(selected_before(-1.0F, 9, -2.0F, 3));
  EXPECT_TRUE(selected_before(1.0F, 3, 1.0F, 9));
  EXPECT_FALSE(selected_before(1.0F, 9, 1.0F, 3));
  EXPECT_FALSE(selected_before(1.0F, 3, 1.0F, 3));
  EXPECT_TRUE(selected_before(std::numeric_limits<float>::infinity(), 9, 3e38F, 0));
}

TEST(SelectedBefore, TakesZerosOfBothSignsAsEqual) {
  EXPECT_TRUE(selected_before(-0.0F, 1, 0.0F, 2));
  EXPECT_FALSE(selected_before(0.0F, 2, -0.0F, 1));
  EXPECT_TRUE(selected_before(0.0F, 1, -0.0F, 2));
  EXPECT_TRUE(selected_before(0x1p-149F, 2, 0.0F, 1));
  EXPECT_TRUE(selected_before(0.0F, 2, -0x1p-149F, 1));
}

TEST(SelectedBefore, IsAStrictOrderOfAllPairs) {
  const std::vector<double> scores = {-kInfinity, -1, -0.0, 0.0, 0x1p-149, 1, 3e38, kInfinity};
  for (const double a : scores)
    for (const double b : scores)
      for (const std::int32_t i : {0, 1})
        for (const std::int32_t j : {0, 1}) {
          const int holds =
              (selected_before(a, i, b, j) ? 1 : 0) + (selected_before(b, j, a, i) ? 1 : 0);
          EXPECT_EQ(holds, a == b && i == j ? 0 : 1);
        }
}

}  // namespace
}  // namespace winnow::tests
