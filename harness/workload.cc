// SPDX-License-Identifier: Apache-2.0
// What all workloads share: how their buffers are made.
#include "harness/workload.h"

#include <algorithm>
#include <array>
#include <limits>
#include <numeric>

#include "harness/numbers.h"
#include "harness/random.h"

namespace winnow::harness {

void run(const KeyWindows& args, const Execution& execution) { key_windows(args, execution); }
void run(const WindowIndices& args, const Execution& execution) { window_indices(args, execution); }
void run(const IndexTopkForward& args, const Execution& execution) {
  index_topk_forward(args, execution);
}
void run(const IndexTopkBackward& args, const Execution& execution) {
  index_topk_backward(args, execution);
}
void run(const SparseAttentionForward& args, const Execution& execution) {
  sparse_attention_forward(args, execution);
}
void run(const SparseAttentionBackward& args, const Execution& execution) {
  sparse_attention_backward(args, execution);
}
void run(const ValueProjectionForward& args, const Execution& execution) {
  value_projection_forward(args, execution);
}
void run(const ValueProjectionBackward& args, const Execution& execution) {
  value_projection_backward(args, execution);
}
void run(const IndexTarget& args, const Execution& execution) { index_target(args, execution); }
void run(const IndexLoss& args, const Execution& execution) { index_loss(args, execution); }
void run(const DenseIndexLossForward& args, const Execution& execution) {
  dense_index_loss_forward(args, execution);
}
void run(const DenseIndexLossBackward& args, const Execution& execution) {
  dense_index_loss_backward(args, execution);
}
void run(const QuantizeFp8& args, const Execution& execution) { quantize_fp8(args, execution); }

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

Buffer& Buffers::add(DType dtype, const Shape& shape) {
  const DType stored = placement_.as_f64 && dtype != DType::i32 ? DType::f64 : dtype;
  return buffers_.emplace_back(placement_.device, stored, shape, row_padding_);
}

Buffer& Buffers::input(DType dtype, const Shape& shape, const Values& values) {
  Buffer& buffer = add(dtype, shape);
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

Buffer& Buffers::query_input(DType dtype, const Shape& inner, const Values& values) {
  std::int64_t lines_of_row = 1;
  for (std::size_t i = 0; i + 1 < inner.size(); ++i) lines_of_row *= inner[i];
  return input(dtype, query_shape(inner), [&](std::int64_t line, std::span<double> elements) {
    values(rows_[line / lines_of_row] * lines_of_row + line % lines_of_row, elements);
  });
}

Buffer& Buffers::query_ints(const Shape& inner, const std::vector<std::int32_t>& of_case) {
  const std::int64_t width = inner.empty() ? 1 : inner.back();
  std::vector<std::int32_t> held;
  held.reserve(rows_.size() * width);
  for (const std::int64_t row : rows_)
    held.insert(held.end(), of_case.begin() + row * width, of_case.begin() + (row + 1) * width);
  Buffer& buffer = add(DType::i32, query_shape(inner));
  buffer.upload(held);
  return buffer;
}

Buffer& Buffers::query_output(DType dtype, const Shape& inner) {
  return add(dtype, query_shape(inner));
}

Buffer& Buffers::ints(const std::vector<std::int32_t>& values) {
  Buffer& buffer = add(DType::i32, {static_cast<std::int64_t>(values.size())});
  buffer.upload(values);
  return buffer;
}

Buffer& Buffers::output(DType dtype, const Shape& shape) { return add(dtype, shape); }

Buffer& Buffers::sum(const Shape& shape) {
  return input(DType::f32, shape, normal("what is there already", as_f64() ? 0 : 1));
}

Buffer& Buffers::absent() { return buffers_.emplace_back(); }

Buffer& Buffers::sink(const Case& c) {
  if (!c.sink) return absent();
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  constexpr std::array kExtremes{-kInfinity, kInfinity, 30.0};
  Buffer& buffer = input(DType::f32, {c.heads}, normal("sink"));
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

std::size_t Buffers::bytes() const {
  std::size_t sum = 0;
  for (const Buffer& buffer : buffers_) sum += buffer.bytes();
  return sum;
}

bool Buffers::canaries_intact() const {
  return std::all_of(buffers_.begin(), buffers_.end(),
                     [](const Buffer& buffer) { return buffer.canaries_intact(); });
}

Values nan_unless(std::vector<bool> readable, std::int64_t lines_each, Values values) {
  return [readable = std::move(readable), lines_each, values = std::move(values)](
             std::int64_t line, std::span<double> elements) {
    if (readable[line / lines_each]) return values(line, elements);
    std::fill(elements.begin(), elements.end(), std::numeric_limits<double>::quiet_NaN());
  };
}

}  // namespace winnow::harness
