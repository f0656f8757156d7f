// SPDX-License-Identifier: Apache-2.0
// quantize_fp8: scales, rounding, the floor of amax, powers of two, infinities and NaN.
#include <cmath>

#include "tests/testing.h"

namespace winnow::tests {
namespace {

struct Quantized {
  Values values, scale;

  Values dequantised() const {
    const auto dim = static_cast<std::int64_t>(values.size() / scale.size());
    Values result = values;
    for (std::size_t i = 0; i < result.size(); ++i) result[i] *= scale[i / dim];
    return result;
  }
};

struct Options {
  bool power_of_two = false;
  std::int64_t row_padding = 0;
};

Quantized quantized(DType dtype, const Shape& shape, const Values& x, const Execution& execution,
                    const Options& options = {}) {
  const Device device = harness::device_of(execution.backend);
  const Buffer source = floats(device, dtype, shape, x, options.row_padding);
  const Buffer values(device, DType::f8_e4m3, shape, options.row_padding);
  const Buffer scale(device, DType::f32, Shape(shape.begin(), shape.end() - 1));
  quantize_fp8({.x = source.tensor(),
                .values = values.tensor(),
                .scale = scale.tensor(),
                .power_of_two = options.power_of_two},
               execution);
  expect_canaries_intact(source, values, scale);
  return {values.download(), scale.download()};
}

/// One row of f32.
Quantized row(const Values& x, Backend backend, bool power_of_two = false) {
  return quantized(DType::f32, {1, static_cast<std::int64_t>(x.size())}, x, on(backend),
                   {.power_of_two = power_of_two});
}

TEST(QuantizeFp8, ScalesTheLargestTo448) {
  on_each_backend([](Backend backend) {
    const Quantized result = row({1, -3.5, 7, 0, -0.0, 0.015625, 2, 3}, backend);
    EXPECT_EQ(result.scale, Values{7.0 / 448});
    EXPECT_TRUE(same_bits(result.values, {64, -224, 448, 0, -0.0, 1, 128, 192}));
  });
}

TEST(QuantizeFp8, FloorsTheLargestAt1em4) {
  on_each_backend([](Backend backend) {
    const double floor = harness::rounded(DType::f32, static_cast<double>(1e-4F / 448.0F));
    for (const double largest : {0.0, 1e-30, 1e-5, 0.999e-4})
      EXPECT_EQ(row({0, -largest, 0, 0}, backend).scale, Values{floor}) << largest;
    EXPECT_GT(row({0, 1.01e-4, 0, 0}, backend).scale[0], floor);
    const Quantized zeros = row(Values(8, 0), backend);
    EXPECT_TRUE(all_equal(zeros.values, 0));
  });
}

TEST(QuantizeFp8, PowersOfTwoAreTheSmallestThatServe) {
  on_each_backend([](Backend backend) {
    const Random random(1, "exponents");
    for (int i = 0; i < 300; ++i) {
      const double largest = harness::rounded(
          DType::f32, std::ldexp(1 + random.uniform(2 * i),
                                 static_cast<int>(random.below(2 * i + 1, 60)) - 13));
      const double scale = row({largest, -0.5 * largest}, backend, true).scale[0];
      int exponent = 0;
      EXPECT_EQ(std::frexp(scale, &exponent), 0.5) << scale;
      EXPECT_GE(scale * 448, largest);
      EXPECT_LT(scale / 2 * 448, largest);
    }
    // A power of two, and the next float above it.
    EXPECT_EQ(row({448, 1}, backend, true).scale[0], 1);
    EXPECT_EQ(row({448 * 0x1p-10, 0}, backend, true).scale[0], 0x1p-10);
    EXPECT_EQ(row({std::nextafter(448.0F, 500.0F), 1}, backend, true).scale[0], 2);
    // The floor: 1e-4 / 448 lies between 2^-23 and 2^-22.
    EXPECT_EQ(row({0, 0}, backend, true).scale[0], 0x1p-22);
  });
}

TEST(QuantizeFp8, RoundTripsWithinHalfAStep) {
  on_each_backend([](Backend backend) {
    for (const DType dtype : {DType::bf16, DType::f16, DType::f32})
      for (const bool power_of_two : {false, true}) {
        SCOPED_TRACE(name(dtype));
        const Values x = as_stored(dtype, normals(40 * 128, 2, "x", 3));
        const Quantized result =
            quantized(dtype, {40, 128}, x, on(backend), {.power_of_two = power_of_two});
        const Values back = result.dequantised();
        for (std::size_t i = 0; i < x.size(); ++i) {
          // Three mantissa bits give an error of 2^-4 of the value; below 2^-6 * scale the step is
          // 2^-9. The fp32 division by the scale adds its own rounding.
          const double scale = result.scale[i / 128];
          const double half_step =
              std::max(std::abs(x[i]) * 0x1p-4, scale * 0x1p-10) * (1 + 0x1p-20);
          ASSERT_LE(std::abs(back[i] - x[i]), half_step) << x[i];
        }
      }
  });
}

TEST(QuantizeFp8, RoundsTheFloatQuotientToNearestEven) {
  on_each_backend([](Backend backend) {
    for (const bool power_of_two : {false, true}) {
      const Values x = as_stored(DType::f32, normals(64 * 64, 3, "x", 0.1));
      const Quantized result =
          quantized(DType::f32, {64, 64}, x, on(backend), {.power_of_two = power_of_two});
      for (std::size_t i = 0; i < x.size(); ++i) {
        const float quotient = static_cast<float>(x[i]) / static_cast<float>(result.scale[i / 64]);
        ASSERT_EQ(result.values[i], harness::rounded(DType::f8_e4m3, quotient)) << x[i];
      }
    }
    // Ties, with a scale of 1: between 16 and 18, 18 and 20, and in the smallest step.
    const Quantized ties = row({448, 17, 19, -17, -19, 0x1p-10, 3 * 0x1p-10, -0x1p-10}, backend);
    EXPECT_TRUE(same_bits(ties.values, {448, 16, 20, -16, -20, 0, 0x1p-8, -0.0}));
  });
}

TEST(QuantizeFp8, NanStaysAndInfinitySaturates) {
  on_each_backend([](Backend backend) {
    const Quantized result = row({kNaN, kInfinity, -kInfinity, 7, -3.5, -kNaN}, backend);
    EXPECT_EQ(result.scale, Values{7.0 / 448});  // from the largest finite value
    EXPECT_TRUE(same_bits(result.values, {kNaN, 448, -448, 448, -224, kNaN}));
    const Quantized nothing_finite = row({kNaN, kInfinity}, backend);
    EXPECT_EQ(nothing_finite.scale, row({0, 0}, backend).scale);
    EXPECT_TRUE(same_bits(nothing_finite.values, {kNaN, 448}));
  });
}

TEST(QuantizeFp8, TakesTheLargestFloats) {
  on_each_backend([](Backend backend) {
    for (const bool power_of_two : {false, true}) {
      const double largest = std::numeric_limits<float>::max();
      const Quantized result = row({largest, -largest / 2}, backend, power_of_two);
      EXPECT_TRUE(std::isfinite(result.scale[0]));
      EXPECT_NEAR(result.dequantised()[0] / largest, 1, 0x1p-4);
      EXPECT_NEAR(result.dequantised()[1] / largest, -0.5, 0x1p-5);
    }
  });
}

TEST(QuantizeFp8, HeadsAreRowsOfTheirOwn) {
  on_each_backend([](Backend backend) {
    const Values x = normals(5 * 3 * 16, 4, "x");
    const Quantized flat = quantized(DType::bf16, {15, 16}, x, on(backend));
    const Quantized heads = quantized(DType::bf16, {5, 3, 16}, x, on(backend));
    EXPECT_TRUE(same_bits(heads.values, flat.values));
    EXPECT_TRUE(same_bits(heads.scale, flat.scale));
  });
}

TEST(QuantizeFp8, RowsStridesAndThreadsDoNotMatter) {
  on_each_backend([](Backend backend) {
    for (const std::int64_t dim : {1, 7, 128}) {
      const Values x = normals(9 * dim, 5, "x");
      const Quantized together = quantized(DType::bf16, {9, dim}, x, on(backend));
      for (std::int64_t t = 0; t < 9; ++t) {
        const Quantized alone =
            quantized(DType::bf16, {1, dim}, part(x, t * dim, dim), on(backend));
        EXPECT_TRUE(same_bits(alone.values, part(together.values, t * dim, dim)));
        EXPECT_TRUE(same_bits(alone.scale, part(together.scale, t, 1)));
      }
      for (const std::int64_t padding : {3, 8})
        EXPECT_TRUE(same_bits(
            quantized(DType::bf16, {9, dim}, x, on(backend), {.row_padding = padding}).values,
            together.values));
      for (const int threads : {1, 2, 5})
        EXPECT_TRUE(same_bits(
            quantized(DType::bf16, {9, dim}, x, {.backend = backend, .threads = threads}).values,
            together.values));
    }
  });
}

TEST(QuantizeFp8, OfNoRowsIsNothing) {
  on_each_backend([](Backend backend) {
    EXPECT_TRUE(quantized(DType::bf16, {0, 16}, {}, on(backend)).values.empty());
    EXPECT_TRUE(quantized(DType::bf16, {0, 3, 16}, {}, on(backend)).values.empty());
    EXPECT_TRUE(quantized(DType::bf16, {2, 0, 16}, {}, on(backend)).values.empty());
  });
}

}  // namespace
}  // namespace winnow::tests
