// SPDX-License-Identifier: Apache-2.0
// A dumped call with memory of its own.
#include "tools/compare/placed_call.h"

#include <cstddef>
#include <span>

namespace winnow::dump {
namespace {

using harness::Buffer;
using harness::Shape;
using harness::shape_of;

void upload(const std::vector<double>& values, Buffer& buffer) {
  if (buffer.tensor().dtype == DType::i32)
    buffer.upload(std::vector<std::int32_t>(values.begin(), values.end()));
  else
    buffer.upload(values);
}

/// Of a contiguous tensor on the host.
std::span<const std::byte> bytes_of(const Tensor& tensor) {
  std::int64_t bytes = element_bytes(tensor.dtype);
  for (std::int32_t i = 0; i < tensor.rank; ++i) bytes *= tensor.shape[i];
  return {static_cast<const std::byte*>(tensor.data), static_cast<std::size_t>(bytes)};
}

bool is_added_to(const FormatField& field, DType dtype) {
  return !has_query_rows(field) && (dtype == DType::f32 || dtype == DType::f64);
}

}  // namespace

std::size_t row_axis(const FormatField& field, const Shape& shape) {
  return shape.size() > field.dimensions.size() ? 1 : 0;
}

std::vector<double> values_of(const Buffer& buffer) {
  if (buffer.tensor().dtype != DType::i32) return buffer.download();
  const std::vector<std::int32_t> values = buffer.download_ints();
  return {values.begin(), values.end()};
}

std::vector<double> values_of_rows(const FormatField& field, const Buffer& buffer,
                                   const harness::Rows& rows) {
  if (rows.empty() || !has_query_rows(field)) return values_of(buffer);
  const Shape shape = shape_of(buffer.tensor());
  const std::size_t axis = row_axis(field, shape);
  const std::int64_t slices = axis == 0 ? 1 : shape[0];
  if (axis == 0) {
    if (buffer.tensor().dtype != DType::i32) return buffer.download(rows);
    const std::vector<std::int32_t> values = buffer.download_ints(rows);
    return {values.begin(), values.end()};
  }
  const std::vector<double> all = values_of(buffer);
  const std::int64_t tokens = shape[1];
  const auto width =
      static_cast<std::int64_t>(all.size()) / std::max<std::int64_t>(slices * tokens, 1);
  std::vector<double> values;
  for (std::int64_t slice = 0; slice < slices; ++slice)
    for (const std::int64_t row : rows) {
      const auto first = all.begin() + (slice * tokens + row) * width;
      values.insert(values.end(), first, first + width);
    }
  return values;
}

PlacedTensors::PlacedTensors(const DumpedCall& call, const Placement& placement)
    : call_(call), placement_(placement) {
  for (const FormatField& field : call.fields) {
    const auto output = call.outputs.find(field.name);
    const Buffer* const source = call.find(field.name);
    if (output != call.outputs.end())
      add_output(field, output->second);
    else if (field.role == FieldRole::input && source != nullptr)
      add_input(field, *source);
  }
}

Buffer& PlacedTensors::put(std::string_view name, DType dtype, const Shape& shape,
                           const std::vector<double>& values) {
  Buffer& buffer = buffers_.add(name, Buffer(placement_.device, dtype, shape));
  upload(values, buffer);
  return buffer;
}

void PlacedTensors::add_input(const FormatField& field, const Buffer& source) {
  const DType dtype = source.tensor().dtype;
  const bool converted = placement_.as_f64 && dtype != DType::i32;
  if (converted && field.name == "k_scale") return;  // it is in k
  if (!converted && placement_.rows.empty()) {       // in numbers of double it would be far larger
    buffers_.add(field.name, Buffer(placement_.device, dtype, shape_of(source.tensor())))
        .upload(bytes_of(source.tensor()));
    return;
  }
  std::vector<double> values = values_of_rows(field, source, placement_.rows);
  if (const Buffer* const scale = call_.find("k_scale");
      converted && field.name == "k" && scale != nullptr) {
    const std::vector<double> of_key = scale->download();
    const std::size_t width = of_key.empty() ? 1 : values.size() / of_key.size();
    for (std::size_t i = 0; i < values.size(); ++i) values[i] *= of_key[i / width];
  }
  Shape shape = shape_of(source.tensor());
  if (has_query_rows(field) && !placement_.rows.empty())
    shape[row_axis(field, shape)] = static_cast<std::int64_t>(placement_.rows.size());
  put(field.name, converted ? DType::f64 : dtype, shape, values);
}

void PlacedTensors::add_output(const FormatField& field, const TypeAndShape& output) {
  Shape shape = output.shape;
  if (has_query_rows(field) && !placement_.rows.empty())
    shape[row_axis(field, shape)] = static_cast<std::int64_t>(placement_.rows.size());
  const bool converted = placement_.as_f64 && output.dtype != DType::i32;
  const DType dtype = converted ? DType::f64 : output.dtype;
  Buffer& buffer = buffers_.add(field.name, Buffer(placement_.device, dtype, shape));
  if (is_added_to(field, dtype))
    buffer.fill([](std::int64_t, std::span<double> elements) {
      std::fill(elements.begin(), elements.end(), 0.0);
    });
}

Outputs PlacedTensors::outputs() const {
  Outputs outputs;
  for (const auto& [name, output] : call_.outputs) outputs[name] = values_of(find(name));
  return outputs;
}

}  // namespace winnow::dump
