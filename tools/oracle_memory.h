// SPDX-License-Identifier: Apache-2.0
// OracleMemory: host memory for calls of the reference backend that judge another's results.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <functional>
#include <numeric>
#include <span>
#include <vector>

#include "harness/memory.h"
#include "harness/trial.h"

namespace winnow::tools {

/// Owns all that it hands out.
class OracleMemory {
 public:
  /// The given rows of a tensor, in double if they are not integers; absent if it is.
  Tensor rows(const harness::Buffer& source, const harness::Rows& rows) {
    if (!source.tensor()) return {};
    harness::Shape shape = shape_of(source);
    shape[0] = static_cast<std::int64_t>(rows.size());
    if (source.tensor().dtype == DType::i32) return ints(shape, source.download_ints(rows));
    return doubles(shape, source.download(rows));
  }
  /// All of a tensor in double.
  Tensor all(const harness::Buffer& source) {
    if (!source.tensor()) return {};
    return doubles(shape_of(source), source.download());
  }
  /// A tensor in its own type; a copy only if it is not on the host.
  Tensor on_host(const harness::Buffer& source) {
    const Tensor& tensor = source.tensor();
    if (!tensor || tensor.device.kind == DeviceKind::cpu) return tensor;
    if (tensor.dtype == DType::i32) return ints(shape_of(source), source.download_ints());
    return filled(tensor.dtype, shape_of(source), source.download()).tensor();
  }
  /// |x| of a contiguous tensor that came from here, in double.
  Tensor magnitudes(const Tensor& tensor) {
    harness::Shape shape(tensor.shape.begin(), tensor.shape.begin() + tensor.rank);
    const std::int64_t count =
        std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>());
    return doubles(shape, harness::magnitudes({static_cast<const double*>(tensor.data),
                                               static_cast<std::size_t>(count)}));
  }
  Tensor doubles(const harness::Shape& shape, std::span<const double> values) {
    return filled(DType::f64, shape, values).tensor();
  }
  Tensor ints(const harness::Shape& shape, std::span<const std::int32_t> values) {
    harness::Buffer& buffer = output(DType::i32, shape);
    buffer.upload(values);
    return buffer.tensor();
  }
  harness::Buffer& filled(DType dtype, const harness::Shape& shape,
                          std::span<const double> values) {
    harness::Buffer& buffer = output(dtype, shape);
    buffer.upload(values);
    return buffer;
  }
  harness::Buffer& output(DType dtype, const harness::Shape& shape) {
    return buffers_.emplace_back(Device{}, dtype, shape);
  }
  /// Zeros, for a call to add to.
  harness::Buffer& sum(DType dtype, const harness::Shape& shape) {
    harness::Buffer& buffer = output(dtype, shape);
    buffer.fill([](std::int64_t, std::span<double> elements) {
      std::fill(elements.begin(), elements.end(), 0.0);
    });
    return buffer;
  }

  static harness::Shape shape_of(const harness::Buffer& buffer) {
    const Tensor& tensor = buffer.tensor();
    return {tensor.shape.begin(), tensor.shape.begin() + tensor.rank};
  }

 private:
  std::deque<harness::Buffer> buffers_;  // keeps its elements where they are
};

}  // namespace winnow::tools
