// SPDX-License-Identifier: Apache-2.0
// Functions on Tensor: construction, description for errors, conversion from DLPack.
#include "winnow/tensor.h"

#include <span>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "core/memory_errors.h"
#include "core/refusals.h"
#include "winnow/error.h"

namespace winnow {
namespace {

// Type and device codes as defined in dlpack.h.
constexpr std::int32_t kDLInt = 0, kDLFloat = 2, kDLBfloat = 4, kDLFloat8E4M3fn = 10;
constexpr std::int32_t kDLCPU = 1, kDLCUDA = 2, kDLCUDAHost = 3;

}  // namespace

Tensor tensor(void* data, DType dtype, std::initializer_list<std::int64_t> shape, Device device) {
  check_dlpack_rank(static_cast<std::int32_t>(shape.size()));
  Tensor view{.data = data,
              .dtype = dtype,
              .device = device,
              .rank = static_cast<std::int32_t>(shape.size())};
  std::int64_t contiguous = 1;
  for (auto i = static_cast<std::int32_t>(shape.size()) - 1; i >= 0; --i) {
    view.shape[i] = std::data(shape)[i];
    view.stride[i] = contiguous;
    // May wrap around: a shape that overflows is refused when an op checks it.
    contiguous = static_cast<std::int64_t>(static_cast<std::uint64_t>(contiguous) *
                                           static_cast<std::uint64_t>(view.shape[i]));
  }
  return view;
}

Tensor tensor_of(void* data, std::size_t elements, DType dtype,
                 std::initializer_list<std::int64_t> shape) {
  const Tensor view = tensor(data, dtype, shape);
  std::size_t product = 1;
  bool valid = true;
  for (const std::int64_t size : shape) {
    valid = valid && size >= 0 &&
            !__builtin_mul_overflow(product, static_cast<std::size_t>(size), &product);
  }
  if (valid && product == elements) return view;
  return with_memory_errors("tensor_of", [&]() -> Tensor {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("tensor_of: shape [{}]: {}", fmt::join(shape, ", "),
                            fmt::format(refusal::element_count, elements)));
  });
}

std::int64_t element_bytes(DType dtype) {
  switch (dtype) {
    case DType::f64:
      return 8;
    case DType::f32:
    case DType::i32:
      return 4;
    case DType::bf16:
    case DType::f16:
      return 2;
    case DType::f8_e4m3:
      return 1;
  }
  return 0;
}

std::string_view name(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return "f32";
    case DType::bf16:
      return "bf16";
    case DType::f16:
      return "f16";
    case DType::f64:
      return "f64";
    case DType::f8_e4m3:
      return "f8_e4m3";
    case DType::i32:
      return "i32";
  }
  return "unknown dtype";
}

std::string describe(const Tensor& tensor) {
  return with_memory_errors("describe", [&]() -> std::string {
    if (!tensor) return "absent";
    if (tensor.rank > 4) return fmt::format("{} of rank {}", name(tensor.dtype), tensor.rank);
    const std::span shape(tensor.shape.data(), static_cast<std::size_t>(tensor.rank));
    std::string text = fmt::format("{}[{}]", name(tensor.dtype), fmt::join(shape, ", "));
    switch (tensor.device.kind) {
      case DeviceKind::cpu:
        return text;
      case DeviceKind::cuda:
        return fmt::format("cuda:{} {}", tensor.device.index, text);
    }
    return fmt::format("device kind {} {}", static_cast<std::int32_t>(tensor.device.kind), text);
  });
}

DType dtype_from_dlpack(std::int32_t code, std::int32_t bits, std::int32_t lanes) {
  if (lanes == 1) {
    if (code == kDLFloat && bits == 32) return DType::f32;
    if (code == kDLFloat && bits == 16) return DType::f16;
    if (code == kDLFloat && bits == 64) return DType::f64;
    if (code == kDLBfloat && bits == 16) return DType::bf16;
    if (code == kDLFloat8E4M3fn && bits == 8) return DType::f8_e4m3;
    if (code == kDLInt && bits == 32) return DType::i32;
  }
  return with_memory_errors("from_dlpack", [&]() -> DType {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("from_dlpack: dtype code {} bits {} lanes {}: {}", code, bits, lanes,
                            refusal::dlpack_dtype));
  });
}

Device device_from_dlpack(std::int32_t device_type, std::int32_t device_id) {
  if (device_type == kDLCPU || device_type == kDLCUDAHost) return {};
  if (device_type == kDLCUDA) return {DeviceKind::cuda, device_id};
  return with_memory_errors("from_dlpack", [&]() -> Device {
    throw Error(ErrorCode::invalid_argument, fmt::format("from_dlpack: device type {}: {}",
                                                         device_type, refusal::dlpack_device));
  });
}

void check_dlpack_rank(std::int32_t rank) {
  if (rank >= 0 && rank <= 4) return;
  with_memory_errors("tensor", [&] {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("tensor of rank {}: {}", rank, refusal::dlpack_rank));
  });
}

}  // namespace winnow
