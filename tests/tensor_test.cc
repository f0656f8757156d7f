// SPDX-License-Identifier: Apache-2.0
// Tensor: construction, description, and views of DLPack tensors.
#include <array>
#include <cstdint>
#include <vector>

#include "tests/testing.h"

namespace winnow::tests {
namespace {

// The structs of DLPack, as declared in dlpack.h.
struct DLDevice {
  std::int32_t device_type;
  std::int32_t device_id;
};
struct DLDataType {
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;
};
struct DLTensor {
  void* data;
  DLDevice device;
  std::int32_t ndim;
  DLDataType dtype;
  std::int64_t* shape;
  std::int64_t* strides;
  std::uint64_t byte_offset;
};

class Dlpack : public ::testing::Test {
 protected:
  std::array<float, 64> memory{};
  std::array<std::int64_t, 5> shape = {2, 3, 4, 1, 1};
  std::array<std::int64_t, 5> strides = {20, 5, 1, 1, 1};
  DLTensor source = {memory.data(), {1, 0}, 3, {2, 32, 1}, shape.data(), nullptr, 0};
};

TEST(Tensor, IsAbsentUnlessMade) {
  const Tensor absent;
  EXPECT_FALSE(absent);
  EXPECT_EQ(describe(absent), "absent");
  EXPECT_TRUE(tensor(nullptr, DType::f32, {0, 4}));
}

TEST(Tensor, IsContiguousAsMade) {
  const Tensor made = tensor(nullptr, DType::bf16, {5, 3, 8}, {DeviceKind::cuda, 2});
  EXPECT_EQ(made.rank, 3);
  EXPECT_EQ(made.dtype, DType::bf16);
  EXPECT_EQ(made.device, (Device{DeviceKind::cuda, 2}));
  EXPECT_EQ(made.shape, (std::array<std::int64_t, 4>{5, 3, 8, 0}));
  EXPECT_EQ(made.stride, (std::array<std::int64_t, 4>{24, 8, 1, 0}));
  EXPECT_EQ(tensor(nullptr, DType::f32, {}).rank, 0);
}

TEST(Tensor, OfValuesHasTheirTypeAndNumber) {
  std::vector<float> floats(6);
  const Tensor made = tensor_of(floats, {2, 3});
  EXPECT_EQ(made.data, floats.data());
  EXPECT_EQ(describe(made), "f32[2, 3]");
  EXPECT_EQ(made.stride, (std::array<std::int64_t, 4>{3, 1, 0, 0}));
  std::array<std::int32_t, 4> whole_numbers{};
  EXPECT_EQ(describe(tensor_of(whole_numbers, {4})), "i32[4]");
  std::vector<double> none;
  EXPECT_EQ(describe(tensor_of(none, {5, 0})), "f64[5, 0]");
}

TEST(Tensor, OfValuesRefusesAnotherNumberOfElements) {
  std::vector<float> floats(6);
  EXPECT_EQ(refusal_of([&] {
              tensor_of(floats, {2, 4});
            }),
            "tensor_of: shape [2, 4]: must have 6 elements, as the memory does");
  EXPECT_NE(refusal_of([&] { tensor_of(floats, {-2, -3}); }), "");
  constexpr std::int64_t kHuge = std::int64_t{1} << 62;
  EXPECT_NE(refusal_of([&] { tensor_of(floats, {kHuge, 4, 6}); }), "");
  EXPECT_NE(refusal_of([&] { tensor_of(floats, {1, 1, 1, 2, 3}); }), "");
}

TEST(Tensor, HasAtMostFourDimensions) {
  EXPECT_EQ(tensor(nullptr, DType::f32, {1, 2, 3, 4}).rank, 4);
  EXPECT_THROW(tensor(nullptr, DType::f32, {1, 2, 3, 4, 5}), Error);
}

TEST(Tensor, OfAbsurdSizeCanBeMadeAndDescribed) {
  const std::int64_t huge = std::int64_t{1} << 62;
  EXPECT_EQ(describe(tensor(nullptr, DType::f32, {huge, huge, 3})),
            "f32[4611686018427387904, 4611686018427387904, 3]");
}

TEST(Tensor, IsDescribedByTypeShapeAndDevice) {
  EXPECT_EQ(describe(tensor(nullptr, DType::bf16, {4096, 64, 576})), "bf16[4096, 64, 576]");
  EXPECT_EQ(describe(tensor(nullptr, DType::f8_e4m3, {7})), "f8_e4m3[7]");
  EXPECT_EQ(describe(tensor(nullptr, DType::f64, {})), "f64[]");
  EXPECT_EQ(describe(tensor(nullptr, DType::i32, {0}, {DeviceKind::cuda, 1})), "cuda:1 i32[0]");
}

TEST(Tensor, OfNonsenseIsStillDescribed) {
  Tensor odd = tensor(nullptr, DType::f16, {2});
  odd.dtype = static_cast<DType>(77);
  EXPECT_EQ(describe(odd), "unknown dtype[2]");
  odd.dtype = DType::f16;
  odd.device.kind = static_cast<DeviceKind>(9);
  EXPECT_EQ(describe(odd), "device kind 9 f16[2]");
  odd.rank = 1000;
  EXPECT_EQ(describe(odd), "f16 of rank 1000");
}

TEST(DTypes, HaveNamesAndSizes) {
  const std::vector<std::pair<DType, std::int64_t>> sizes = {{DType::f32, 4},     {DType::bf16, 2},
                                                             {DType::f16, 2},     {DType::f64, 8},
                                                             {DType::f8_e4m3, 1}, {DType::i32, 4}};
  std::vector<std::string> names;
  for (const auto& [dtype, bytes] : sizes) {
    EXPECT_EQ(element_bytes(dtype), bytes);
    names.emplace_back(name(dtype));
  }
  EXPECT_EQ(names, (std::vector<std::string>{"f32", "bf16", "f16", "f64", "f8_e4m3", "i32"}));
}

TEST_F(Dlpack, WithoutStridesIsContiguous) {
  const Tensor view = from_dlpack(source);
  EXPECT_EQ(view.data, memory.data());
  EXPECT_EQ(view.dtype, DType::f32);
  EXPECT_EQ(view.device, Device{});
  EXPECT_EQ(view.rank, 3);
  EXPECT_EQ(view.shape, (std::array<std::int64_t, 4>{2, 3, 4, 0}));
  EXPECT_EQ(view.stride, (std::array<std::int64_t, 4>{12, 4, 1, 0}));
}

TEST_F(Dlpack, KeepsItsStridesAndByteOffset) {
  source.strides = strides.data();
  source.byte_offset = 12;
  const Tensor view = from_dlpack(source);
  EXPECT_EQ(view.data, memory.data() + 3);
  EXPECT_EQ(view.stride, (std::array<std::int64_t, 4>{20, 5, 1, 0}));
}

TEST_F(Dlpack, MayHaveNoElementsAndNoMemory) {
  shape[0] = 0;
  source.data = nullptr;
  const Tensor view = from_dlpack(source);
  EXPECT_TRUE(view);
  EXPECT_EQ(describe(view), "f32[0, 3, 4]");
}

TEST_F(Dlpack, MayBeAScalar) {
  source.ndim = 0;
  source.shape = nullptr;
  EXPECT_EQ(from_dlpack(source).rank, 0);
}

TEST_F(Dlpack, KnowsEveryTypeOfWinnow) {
  const std::vector<std::pair<DLDataType, DType>> types = {
      {{2, 32, 1}, DType::f32}, {{4, 16, 1}, DType::bf16},    {{2, 16, 1}, DType::f16},
      {{2, 64, 1}, DType::f64}, {{10, 8, 1}, DType::f8_e4m3}, {{0, 32, 1}, DType::i32}};
  for (const auto& [code, dtype] : types) {
    source.dtype = code;
    EXPECT_EQ(from_dlpack(source).dtype, dtype);
  }
}

TEST_F(Dlpack, RefusesOtherTypes) {
  for (const DLDataType type : {DLDataType{0, 64, 1}, DLDataType{1, 32, 1}, DLDataType{2, 8, 1},
                                DLDataType{2, 32, 4}, DLDataType{4, 32, 1}, DLDataType{6, 8, 1},
                                DLDataType{10, 16, 1}, DLDataType{255, 255, 65535}}) {
    source.dtype = type;
    const std::string text = refusal_of([&] { from_dlpack(source); });
    EXPECT_EQ(text, fmt::format("from_dlpack: dtype code {} bits {} lanes {}: dtype must be f32, "
                                "bf16, f16, f64, f8_e4m3 or i32, one lane",
                                type.code, type.bits, type.lanes));
  }
}

TEST_F(Dlpack, KnowsHostAndCudaMemory) {
  source.device = {2, 3};
  EXPECT_EQ(from_dlpack(source).device, (Device{DeviceKind::cuda, 3}));
  source.device = {3, 0};  // pinned
  EXPECT_EQ(from_dlpack(source).device, Device{});
}

TEST_F(Dlpack, RefusesOtherDevices) {
  for (const std::int32_t type : {0, 4, 7, 10, 13, -1}) {
    source.device = {type, 0};
    const std::string text = refusal_of([&] { from_dlpack(source); });
    EXPECT_EQ(text, fmt::format("from_dlpack: device type {}: device must be DLPack's CPU (1), "
                                "CUDA (2) or pinned CUDA memory (3)",
                                type));
  }
}

TEST_F(Dlpack, RefusesRanksThatDoNotFit) {
  for (const std::int32_t rank : {5, 64, -1}) {
    source.ndim = rank;
    const std::string text = refusal_of([&] { from_dlpack(source); });
    EXPECT_NE(text.find(fmt::format("of rank {}: must have 0 to 4 dimensions", rank)),
              std::string::npos)
        << text;
  }
}

TEST_F(Dlpack, OfAbsurdSizeIsAViewThatOpsRefuse) {
  shape = {std::int64_t{1} << 40, std::int64_t{1} << 40, 4, 1, 1};
  const Tensor view = from_dlpack(source);
  const std::string text =
      refusal_of([&] { quantize_fp8({.x = view, .values = view, .scale = view}); });
  EXPECT_EQ(text,
            "quantize_fp8: x f32[1099511627776, 1099511627776, 4]: extends past what 64-bit "
            "offsets can address");
}

}  // namespace
}  // namespace winnow::tests
