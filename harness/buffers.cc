// SPDX-License-Identifier: Apache-2.0
// How the buffers of a case are made.
#include "harness/buffers.h"

#include <algorithm>
#include <array>
#include <limits>
#include <numeric>

#include "harness/numbers.h"
#include "harness/random.h"

namespace winnow::harness {

Buffers::Buffers(const Case& c, const Placement& placement, std::uint64_t seed, std::int64_t batch)
    : placement_(placement),
      seed_(seed),
      batch_(batch),
      tokens_(c.tokens),
      row_padding_(placement.as_f64 ? 0 : c.row_padding),
      rows_(placement.rows),
      live_(c.tokens * std::max<std::int64_t>(batch, 1), placement.live_rows.empty()) {
  if (rows_.empty()) {
    rows_.resize(live_.size());
    std::iota(rows_.begin(), rows_.end(), 0);
  }
  for (const std::int64_t row : placement.live_rows) live_[row] = true;
}

Shape Buffers::query_shape(const Shape& inner) const {
  Shape shape =
      batch_ > 0 ? Shape{batch_, tokens_} : Shape{static_cast<std::int64_t>(rows_.size())};
  shape.insert(shape.end(), inner.begin(), inner.end());
  return shape;
}

Buffer& Buffers::add(std::string_view name, DType dtype, const Shape& shape) {
  const DType stored = placement_.as_f64 && dtype != DType::i32 ? DType::f64 : dtype;
  return named_.add(name, Buffer(placement_.device, stored, shape, row_padding_));
}

Buffer& Buffers::input(std::string_view name, DType dtype, const Shape& shape,
                       const Values& values) {
  Buffer& buffer = add(name, dtype, shape);
  if (!placement_.as_f64) {
    buffer.fill(values);
    return buffer;
  }
  buffer.fill([&](std::int64_t line, std::span<double> elements) {
    values(line, elements);
    for (double& element : elements) element = rounded(dtype, element);
  });
  return buffer;
}

Buffer& Buffers::query_input(std::string_view name, DType dtype, const Shape& inner,
                             const Values& values) {
  std::int64_t lines_of_row = 1;
  for (std::size_t i = 0; i + 1 < inner.size(); ++i) lines_of_row *= inner[i];
  return input(name, dtype, query_shape(inner), [&](std::int64_t line, std::span<double> elements) {
    values(rows_[line / lines_of_row] * lines_of_row + line % lines_of_row, elements);
  });
}

Buffer& Buffers::query_ints(std::string_view name, const Shape& inner,
                            const std::vector<std::int32_t>& of_case) {
  const std::int64_t width = inner.empty() ? 1 : inner.back();
  std::vector<std::int32_t> held;
  held.reserve(rows_.size() * width);
  for (const std::int64_t row : rows_)
    held.insert(held.end(), of_case.begin() + row * width, of_case.begin() + (row + 1) * width);
  Buffer& buffer = add(name, DType::i32, query_shape(inner));
  buffer.upload(held);
  return buffer;
}

Buffer& Buffers::query_output(std::string_view name, DType dtype, const Shape& inner) {
  return add(name, dtype, query_shape(inner));
}

Buffer& Buffers::ints(std::string_view name, const std::vector<std::int32_t>& values) {
  Buffer& buffer = add(name, DType::i32, {static_cast<std::int64_t>(values.size())});
  buffer.upload(values);
  return buffer;
}

Buffer& Buffers::output(std::string_view name, DType dtype, const Shape& shape) {
  return add(name, dtype, shape);
}

Buffer& Buffers::sum(std::string_view name, const Shape& shape) {
  return input(name, DType::f32, shape, normal("what is there already", as_f64() ? 0 : 1));
}

Buffer& Buffers::sink(const Case& c) {
  if (!c.sink) return absent();
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  constexpr std::array kExtremes{-kInfinity, kInfinity, 30.0};
  Buffer& buffer = input("sink", DType::f32, {c.heads}, normal("sink"));
  if (c.extreme_sinks) buffer.upload(kExtremes, {0, 1, 2});
  return buffer;
}

Values Buffers::whole_numbers(std::string_view stream, std::int64_t largest) const {
  return [random = Random(seed_, stream), largest](std::int64_t line, std::span<double> elements) {
    std::int64_t i = line * static_cast<std::int64_t>(elements.size());
    for (double& element : elements)
      element = static_cast<double>(random.below(i++, 2 * largest + 1) - largest);
  };
}

Values Buffers::normal(std::string_view stream, double factor, double mean) const {
  return [random = Random(seed_, stream), factor, mean](std::int64_t line,
                                                        std::span<double> elements) {
    std::int64_t i = line * static_cast<std::int64_t>(elements.size());
    for (double& element : elements) element = (random.normal(i++) + mean) * factor;
  };
}

Values Buffers::if_live(std::int64_t lines_of_row, Values values) const {
  return [this, lines_of_row, values = std::move(values)](std::int64_t line,
                                                          std::span<double> elements) {
    if (live_[line / lines_of_row]) return values(line, elements);
    std::fill(elements.begin(), elements.end(), 0.0);
  };
}

Values nan_unless(std::vector<bool> readable, std::int64_t lines_each, Values values) {
  return [readable = std::move(readable), lines_each, values = std::move(values)](
             std::int64_t line, std::span<double> elements) {
    if (readable[line / lines_each]) return values(line, elements);
    std::fill(elements.begin(), elements.end(), std::numeric_limits<double>::quiet_NaN());
  };
}

}  // namespace winnow::harness
