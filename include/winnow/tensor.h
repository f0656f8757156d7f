// SPDX-License-Identifier: Apache-2.0
// Tensor: a view of memory owned by the caller.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <iterator>
#include <string>
#include <string_view>
#include <type_traits>

namespace winnow {

enum class DType : std::int32_t { f32, bf16, f16, f64, f8_e4m3, i32 };
enum class DeviceKind : std::int32_t { cpu, cuda };

struct Device {
  DeviceKind kind = DeviceKind::cpu;
  std::int32_t index = 0;
  bool operator==(const Device&) const = default;
};

/// A default-constructed Tensor is absent. A tensor with no elements is present and may have null
/// data.
struct Tensor {
  void* data = nullptr;
  DType dtype = DType::f32;
  Device device;
  std::int32_t rank = -1;                // -1: absent
  std::array<std::int64_t, 4> shape{};   // the first `rank` entries are used
  std::array<std::int64_t, 4> stride{};  // in elements; the last one is 1
  explicit operator bool() const { return rank >= 0; }
};

/// The DType of a C++ type; float, double and std::int32_t have one.
template <class T>
constexpr DType dtype_of() {
  static_assert(
      std::is_same_v<T, float> || std::is_same_v<T, double> || std::is_same_v<T, std::int32_t>,
      "name the DType of other types: winnow::tensor(data, DType::bf16, shape)");
  if constexpr (std::is_same_v<T, float>) return DType::f32;
  if constexpr (std::is_same_v<T, double>) return DType::f64;
  return DType::i32;
}

/// A contiguous view of `data`.
Tensor tensor(void* data, DType dtype, std::initializer_list<std::int64_t> shape,
              Device device = {});

/// The same on the CPU, of memory that holds `elements` of them. Throws Error if the shape has
/// another number of elements.
Tensor tensor_of(void* data, std::size_t elements, DType dtype,
                 std::initializer_list<std::int64_t> shape);

/// A contiguous view of a std::vector, std::array or std::span of float, double or std::int32_t.
/// Throws Error if the shape has another number of elements.
template <class Values>
Tensor tensor_of(Values& values, std::initializer_list<std::int64_t> shape) {
  return tensor_of(std::data(values), std::size(values),
                   dtype_of<std::remove_pointer_t<decltype(std::data(values))>>(), shape);
}

std::int64_t element_bytes(DType dtype);
std::string_view name(DType dtype);

/// Formats type and shape: "bf16[4096, 64, 576]", "cuda:1 bf16[...]" on a GPU, or "absent".
std::string describe(const Tensor& tensor);

/// Converts a DLPack type code and width. Throws Error for a type that winnow does not support.
DType dtype_from_dlpack(std::int32_t code, std::int32_t bits, std::int32_t lanes);
/// Converts a DLPack device. Throws Error for a device type that winnow does not support.
Device device_from_dlpack(std::int32_t device_type, std::int32_t device_id);
/// Throws Error if a tensor of this rank does not fit into Tensor.
void check_dlpack_rank(std::int32_t rank);

/// A view of a DLPack tensor. A template, so that no DLPack header is needed here.
template <class DLTensor>
Tensor from_dlpack(const DLTensor& source) {
  check_dlpack_rank(source.ndim);
  Tensor view;
  view.data = static_cast<char*>(source.data) + source.byte_offset;
  view.dtype = dtype_from_dlpack(source.dtype.code, source.dtype.bits, source.dtype.lanes);
  view.device = device_from_dlpack(static_cast<std::int32_t>(source.device.device_type),
                                   source.device.device_id);
  view.rank = source.ndim;
  std::int64_t contiguous = 1;
  for (std::int32_t i = source.ndim - 1; i >= 0; --i) {
    view.shape[i] = source.shape[i];
    view.stride[i] = source.strides != nullptr ? source.strides[i] : contiguous;
    // May wrap around: a shape that overflows is refused when an op checks it.
    contiguous = static_cast<std::int64_t>(static_cast<std::uint64_t>(contiguous) *
                                           static_cast<std::uint64_t>(source.shape[i]));
  }
  return view;
}

}  // namespace winnow
