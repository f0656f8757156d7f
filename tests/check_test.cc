// SPDX-License-Identifier: Apache-2.0
// Check: the form of error messages, named dimensions, and detection of overlapping outputs.
#include "core/check.h"

#include <limits>

#include "tests/testing.h"

namespace winnow::tests {
namespace {

char memory[1 << 16];

Tensor made(std::initializer_list<std::int64_t> shape, DType dtype = DType::f32,
            Device device = {}) {
  return tensor(memory, dtype, shape, device);
}

Tensor strided(Tensor view, std::initializer_list<std::int64_t> strides) {
  int i = 0;
  for (const std::int64_t stride : strides) view.stride[i++] = stride;
  return view;
}

/// The error for `tensor` as an output of two dimensions; empty if it is accepted.
std::string output_refusal(const Tensor& tensor) {
  return refusal_of([&] { Check("op").output("y", tensor, {"rows", "columns"}, {DType::f32}); });
}

TEST(Check, TextsAreOpArgumentGivenAllowed) {
  const Check check("some_op");
  EXPECT_EQ(refusal_of([&] { check.fail("x", "7", refusal::at_most, 3); }),
            "some_op: x 7: must be at most 3");
  EXPECT_EQ(refusal_of([&] { check.in_range("x", -5, 0, 9); }),
            "some_op: x -5: must be at least 0");
  EXPECT_EQ(refusal_of([&] { check.in_range("x", 10, 0, 9); }), "some_op: x 10: must be at most 9");
  EXPECT_EQ(refusal_of([&] { check.in_range("x", 9, 0, 9); }), "");
  EXPECT_EQ(refusal_of([&] { check.finite("x", kInfinity); }), "some_op: x inf: must be finite");
  EXPECT_EQ(refusal_of([&] { check.finite("x", -3e38); }), "");
}

TEST(Check, ErrorsAreTheCallersMistake) {
  try {
    Check("op").fail("x", "7", refusal::not_finite);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
  }
}

TEST(Check, DimensionsOfOneNameHaveOneSize) {
  Check check("op");
  const Tensor a = made({4, 6}), b = made({6, 5}), c = made({4, 5});
  check.input("a", a, {"m", "k"}, {DType::f32});
  check.input("b", b, {"k", "n"}, {DType::f32});
  check.output("c", c, {"m", "n"}, {DType::f32});
  EXPECT_EQ(check.dim("m"), 4);
  EXPECT_EQ(check.dim("k"), 6);
  EXPECT_EQ(check.dim("n"), 5);
  const Tensor wrong = made({4, 7});
  EXPECT_EQ(refusal_of([&] {
              check.input("d", wrong, {"m", "k"}, {DType::f32});
            }),
            "op: d f32[4, 7]: k must be 6, as in a");
}

TEST(Check, RangesOfDimensionsNameTheTensorThatHasThem) {
  Check check("op");
  const Tensor a = made({4, 6});
  check.input("a", a, {"m", "k"}, {DType::f32});
  check.dim_in_range("k", 6, 6);
  check.dim_multiple_of("k", 3);
  EXPECT_EQ(refusal_of([&] { check.dim_in_range("k", 7, 9); }),
            "op: a f32[4, 6]: k must be at least 7");
  EXPECT_EQ(refusal_of([&] { check.dim_in_range("k", 0, 5); }),
            "op: a f32[4, 6]: k must be at most 5");
  EXPECT_EQ(refusal_of([&] { check.dim_multiple_of("k", 4); }),
            "op: a f32[4, 6]: k must be a multiple of 4");
}

TEST(Check, ALeadingDimensionComesFirst) {
  Check check("op");
  check.set_leading_dim("batch");
  const Tensor a = made({2, 4, 6});
  check.input("a", a, {"m", "k"}, {DType::f32});
  EXPECT_EQ(check.dim("batch"), 2);
  const Tensor b = made({4, 6});
  EXPECT_EQ(refusal_of([&] {
              check.input("b", b, {"m", "k"}, {DType::f32});
            }),
            "op: b f32[4, 6]: must have 3 dimensions, [batch, m, k]");
  check.set_leading_dim(std::nullopt);
  check.input("b", b, {"m", "k"}, {DType::f32});
}

TEST(Check, OptionalTensorsMayBeAbsentAndOthersNot) {
  Check check("op");
  check.optional_input("a", {}, {"m"}, {DType::f32});
  check.optional_output("a", {}, {"m"}, {DType::f32});
  EXPECT_EQ(refusal_of([&] { check.input("a", {}, {"m"}, {DType::f32}); }),
            "op: a absent: must be given");
  EXPECT_EQ(refusal_of([&] { check.output("a", {}, {"m"}, {DType::f32}); }),
            "op: a absent: must be given");
}

TEST(Check, TypesAreListedOnce) {
  const Tensor a = made({4}, DType::i32);
  EXPECT_EQ(refusal_of([&] {
              Check("op").input("a", a, {"m"}, {DType::f32, DType::f64, DType::f32});
            }),
            "op: a i32[4]: dtype must be f32 or f64");
  EXPECT_EQ(refusal_of([&] {
              Check("op").input("a", a, {"m"}, {DType::f32, DType::f32});
            }),
            "op: a i32[4]: dtype must be f32");
}

TEST(Check, AllTensorsAreOnTheDeviceOfTheFirst) {
  Check check("op");
  const Tensor a = made({4}, DType::f32, {DeviceKind::cuda, 1});
  const Tensor b = made({4}, DType::f32, {DeviceKind::cuda, 2});
  check.input("a", a, {"m"}, {DType::f32});
  EXPECT_EQ(check.device(), (Device{DeviceKind::cuda, 1}));
  EXPECT_FALSE(check.on_host());
  EXPECT_EQ(refusal_of([&] { check.input("b", b, {"m"}, {DType::f32}); }),
            "op: b cuda:2 f32[4]: must be on cuda:1, as a");
}

TEST(Check, OutputsFromSlicesPermutationsAndPaddingDoNotOverlap) {
  EXPECT_EQ(output_refusal(made({3, 4})), "");
  EXPECT_EQ(output_refusal(strided(made({3, 4}), {7, 1})), "");
  EXPECT_EQ(output_refusal(strided(made({1, 4}), {0, 1})), "");
  EXPECT_EQ(output_refusal(strided(made({3, 1}), {1, 1})), "");
  EXPECT_EQ(output_refusal(strided(made({0, 4}), {0, 1})), "");
  const Tensor permuted = strided(made({3, 2, 4}), {4, 12, 1});
  EXPECT_EQ(refusal_of([&] {
              Check("op").output("y", permuted, {"a", "b", "c"}, {DType::f32});
            }),
            "");
}

TEST(Check, OutputsWhoseElementsMeetAreRefused) {
  const std::string refused = "elements of an output must not overlap";
  EXPECT_EQ(output_refusal(strided(made({3, 4}), {0, 1})), "op: y f32[3, 4]: " + refused);
  EXPECT_EQ(output_refusal(strided(made({3, 4}), {1, 1})), "op: y f32[3, 4]: " + refused);
  EXPECT_EQ(output_refusal(strided(made({3, 4}), {3, 1})), "op: y f32[3, 4]: " + refused);
  const Tensor crossing = strided(made({2, 3, 4}), {8, 4, 1});
  EXPECT_EQ(refusal_of([&] {
              Check("op").output("y", crossing, {"a", "b", "c"}, {DType::f32});
            }),
            "op: y f32[2, 3, 4]: " + refused);
  // An input may have overlapping rows.
  const Tensor repeated = strided(made({3, 4}), {0, 1});
  EXPECT_EQ(refusal_of([&] { Check("op").input("x", repeated, {"a", "b"}, {DType::f32}); }), "");
}

TEST(Check, SizesThatPass64BitsAreRefused) {
  const std::int64_t most = std::numeric_limits<std::int64_t>::max();
  const std::string refused = "extends past what 64-bit offsets can address";
  for (const Tensor& tensor :
       {made({most, most}), made({most, 2}), strided(made({3, 4}), {most / 2, 1}),
        strided(made({2, most / 2}), {most / 2, 1})}) {
    const std::string text = output_refusal(tensor);
    EXPECT_NE(text.find(refused), std::string::npos) << describe(tensor) << " " << text;
  }
}

TEST(Check, NoElementsNeedNoMemory) {
  EXPECT_EQ(output_refusal(tensor(nullptr, DType::f32, {0, 4})), "");
  EXPECT_EQ(output_refusal(tensor(nullptr, DType::f32, {4, 0})), "");
  EXPECT_EQ(output_refusal(tensor(nullptr, DType::f32, {1, 1})),
            "op: y f32[1, 1]: data must not be null");
}

// The expanded gradient on a rank without rows: torch's contiguous() does not change its strides.
TEST(Check, NoElementsNeedNoStrides) {
  EXPECT_EQ(output_refusal(strided(made({0, 4}), {0, 0})), "");
  EXPECT_EQ(output_refusal(strided(made({2, 4}), {4, 0})),
            "op: y f32[2, 4]: the last stride must be 1");
}

}  // namespace
}  // namespace winnow::tests
