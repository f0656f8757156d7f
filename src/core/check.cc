// SPDX-License-Identifier: Apache-2.0
#include "core/check.h"

#include <algorithm>
#include <array>
#include <cassert>
#include <cmath>
#include <cstdint>

#include <fmt/ranges.h>

namespace winnow {
namespace {

/// Formats a list of types: "bf16, f16 or f32".
std::string list_of(DTypes dtypes) {
  std::vector<std::string_view> names;
  for (const DType dtype : dtypes) {
    if (std::find(names.begin(), names.end(), name(dtype)) == names.end())
      names.push_back(name(dtype));
  }
  const std::string_view last = names.back();
  names.pop_back();
  return names.empty() ? std::string(last) : fmt::format("{} or {}", fmt::join(names, ", "), last);
}

/// Bytes from the first element to the end of the last one; nullopt where that overflows 64 bits.
std::optional<std::int64_t> extent_bytes(const Tensor& tensor) {
  std::int64_t elements = 1;
  std::int64_t last = 0;
  for (int i = 0; i < tensor.rank; ++i) {
    if (__builtin_mul_overflow(elements, tensor.shape[i], &elements)) return std::nullopt;
  }
  if (elements == 0) return 0;
  for (int i = 0; i < tensor.rank; ++i) {
    std::int64_t reach = 0;
    if (__builtin_mul_overflow(tensor.shape[i] - 1, tensor.stride[i], &reach)) return std::nullopt;
    if (__builtin_add_overflow(last, reach, &last)) return std::nullopt;
  }
  std::int64_t bytes = 0;
  if (__builtin_add_overflow(last, std::int64_t{1}, &last)) return std::nullopt;
  if (__builtin_mul_overflow(last, element_bytes(tensor.dtype), &bytes)) return std::nullopt;
  return bytes;
}

/// Whether two index tuples may address the same element. Exact for every layout that comes from
/// permuting, slicing and padding a contiguous array.
bool overlaps_itself(const Tensor& tensor) {
  std::vector<std::pair<std::int64_t, std::int64_t>> dims;  // stride, size
  for (int i = 0; i < tensor.rank; ++i) {
    if (tensor.shape[i] == 0) return false;
    if (tensor.shape[i] > 1) dims.emplace_back(tensor.stride[i], tensor.shape[i]);
  }
  std::sort(dims.begin(), dims.end());
  std::int64_t reach = 0;  // the largest offset within the dimensions of smaller stride
  for (const auto& [stride, size] : dims) {
    if (stride <= reach) return true;
    reach += stride * (size - 1);
  }
  return false;
}

}  // namespace

std::string describe(Device device) {
  return device.kind == DeviceKind::cpu ? "cpu" : fmt::format("cuda:{}", device.index);
}

void Check::input(const char* argument, const Tensor& tensor, Dims dims, DTypes dtypes) {
  if (!tensor) fail(argument, "absent", refusal::absent);
  check(argument, tensor, dims, dtypes);
}

void Check::output(const char* argument, const Tensor& tensor, Dims dims, DTypes dtypes) {
  input(argument, tensor, dims, dtypes);
  if (overlaps_itself(tensor)) {
    fail(argument, winnow::describe(tensor), refusal::overlap);
  }
}

void Check::optional_input(const char* argument, const Tensor& tensor, Dims dims, DTypes dtypes) {
  if (tensor) input(argument, tensor, dims, dtypes);
}

void Check::optional_output(const char* argument, const Tensor& tensor, Dims dims, DTypes dtypes) {
  if (tensor) output(argument, tensor, dims, dtypes);
}

void Check::check(const char* argument, const Tensor& tensor, Dims dims, DTypes dtypes) {
  const auto refuse = [&](const char* sentence, const auto&... values) {
    fail(argument, winnow::describe(tensor), sentence, values...);
  };
  std::array<std::string_view, 5> names;
  std::size_t rank = 0;
  if (leading_dim_) names[rank++] = *leading_dim_;
  for (const char* name : dims) names[rank++] = name;

  if (tensor.rank != static_cast<std::int32_t>(rank)) {
    refuse(refusal::rank, rank, fmt::join(names.begin(), names.begin() + rank, ", "));
  }
  if (std::find(dtypes.begin(), dtypes.end(), tensor.dtype) == dtypes.end()) {
    refuse(refusal::dtype, list_of(dtypes));
  }
  if (tensor.device.kind != DeviceKind::cpu && tensor.device.kind != DeviceKind::cuda) {
    refuse(refusal::device_kind);
  }
  if (device_argument_ == nullptr) {
    device_ = tensor.device;
    device_argument_ = argument;
  } else if (tensor.device != device_) {
    refuse(refusal::device, describe(device_), device_argument_);
  }
  for (std::size_t i = 0; i < rank; ++i) {
    if (tensor.shape[i] < 0) refuse(refusal::negative_shape);
    if (tensor.stride[i] < 0) refuse(refusal::negative_stride);
  }
  const std::optional<std::int64_t> bytes = extent_bytes(tensor);
  // The strides of an empty tensor are not checked: torch calls it contiguous whatever they are.
  if (rank > 0 && bytes != 0 && tensor.shape[rank - 1] > 1 && tensor.stride[rank - 1] != 1)
    refuse(refusal::inner_stride);
  if (!bytes) refuse(refusal::too_large);
  if (*bytes > 0 && tensor.data == nullptr) refuse(refusal::null_data);
  const auto alignment = static_cast<std::uintptr_t>(element_bytes(tensor.dtype));
  if (reinterpret_cast<std::uintptr_t>(tensor.data) % alignment != 0)
    refuse(refusal::misaligned, alignment);
  for (std::size_t i = 0; i < rank; ++i) bind(argument, tensor, names[i], tensor.shape[i]);
}

void Check::bind(const char* argument, const Tensor& tensor, std::string_view name,
                 std::int64_t size) {
  const BoundDim* const dim = find(name);
  if (dim == nullptr) {
    dims_.push_back({name, size, argument, &tensor});
  } else if (dim->size != size) {
    fail(argument, winnow::describe(tensor), refusal::dim_differs, name, dim->size, dim->argument);
  }
}

const Check::BoundDim* Check::find(std::string_view name) const {
  const auto found =
      std::find_if(dims_.begin(), dims_.end(), [&](const BoundDim& d) { return d.name == name; });
  return found == dims_.end() ? nullptr : &*found;
}

const Check::BoundDim& Check::bound(std::string_view name) const {
  const BoundDim* const dim = find(name);
  assert(dim != nullptr);
  return *dim;
}

std::int64_t Check::dim(std::string_view name) const { return bound(name).size; }

void Check::dim_in_range(std::string_view name, std::int64_t least, std::int64_t most) const {
  const BoundDim& dim = bound(name);
  const auto refuse = [&](const char* sentence, std::int64_t limit) {
    fail(dim.argument, winnow::describe(*dim.tensor), sentence, name, limit);
  };
  if (dim.size < least) refuse(refusal::dim_at_least, least);
  if (dim.size > most) refuse(refusal::dim_at_most, most);
}

void Check::dim_multiple_of(std::string_view name, std::int64_t factor) const {
  const BoundDim& dim = bound(name);
  if (dim.size % factor != 0) {
    fail(dim.argument, winnow::describe(*dim.tensor), refusal::dim_multiple, name, factor);
  }
}

void Check::in_range(const char* argument, std::int64_t value, std::int64_t least,
                     std::int64_t most) const {
  if (value < least) fail(argument, fmt::to_string(value), refusal::at_least, least);
  if (value > most) fail(argument, fmt::to_string(value), refusal::at_most, most);
}

void Check::finite(const char* argument, double value) const {
  if (!std::isfinite(value)) fail(argument, fmt::to_string(value), refusal::not_finite);
}

}  // namespace winnow
