// SPDX-License-Identifier: Apache-2.0
// Buffer: the memory of one tensor, on any device, between canaries.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "winnow/tensor.h"

namespace winnow::harness {

using Shape = std::vector<std::int64_t>;
using Rows = std::vector<std::int64_t>;

inline Shape shape_of(const Tensor& tensor) {
  return {tensor.shape.begin(), tensor.shape.begin() + tensor.rank};
}

/// Writes the values of one line: an innermost row, counted over the dimensions before it, or one
/// element of a tensor of rank 1. Called from several threads.
using Values = std::function<void(std::int64_t line, std::span<double> values)>;

/// Owns a tensor. Bytes before it, behind it and, with `row_padding`, between its rows hold a
/// canary pattern; with an odd padding the rows are misaligned too. Elements start as poison: NaN,
/// or a large number for i32. Host values are in logical order, whatever the strides; `rows` are
/// rows of the first dimension.
class Buffer {
 public:
  Buffer() = default;  // an absent tensor
  Buffer(Device device, DType dtype, const Shape& shape, std::int64_t row_padding = 0);

  const Tensor& tensor() const { return tensor_; }
  std::size_t bytes() const { return bytes_; }

  void poison();
  void fill(const Values& values);
  void upload(std::span<const double> values);
  void upload(std::span<const std::int32_t> values);
  void upload(std::span<const std::byte> elements);  // of the tensor's own type
  void upload(std::span<const double> values, const Rows& rows);
  std::vector<double> download() const;
  std::vector<double> download(const Rows& rows) const;
  std::vector<std::int32_t> download_ints() const;
  std::vector<std::int32_t> download_ints(const Rows& rows) const;

  bool canaries_intact() const;

 private:
  enum class Access : std::int32_t {
    read,
    write,
    modify
  };  // write: what was there does not matter
  struct Free {
    Device device;
    void operator()(std::byte* memory) const noexcept;
  };

  std::int64_t line_length() const;
  std::int64_t lines() const;
  std::int64_t lines_of_row() const;
  std::size_t line_bytes() const;
  std::size_t offset(std::int64_t line) const;  // in bytes, from the start of the memory
  std::size_t end_byte() const;                 // behind the tensor
  bool packed() const;                          // no gaps between lines

  template <class F>
  void on_host(std::size_t first, std::size_t last, Access access, F f) const;
  template <class F>
  void on_lines(Access access, F f) const;
  template <class F>
  void on_lines(const Rows& rows, Access access, F f) const;

  Tensor tensor_;
  std::size_t bytes_ = 0;       // of the memory, canaries included
  std::size_t first_byte_ = 0;  // of the tensor in the memory
  std::unique_ptr<std::byte[], Free> memory_;
};

}  // namespace winnow::harness
