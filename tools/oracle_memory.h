// SPDX-License-Identifier: Apache-2.0
// OracleMemory: host memory for calls of the reference backend that judge another's results.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <span>
#include <string_view>
#include <vector>

#include "harness/arguments.h"
#include "harness/memory.h"
#include "harness/trial.h"

namespace winnow::tools {

/// Owns all that it hands out.
class OracleMemory {
 public:
  /// The given rows of a tensor, in double if they are not integers.
  Tensor rows(const harness::Buffer& source, const harness::Rows& rows) {
    harness::Shape shape = harness::shape_of(source.tensor());
    shape[0] = static_cast<std::int64_t>(rows.size());
    if (source.tensor().dtype == DType::i32)
      return filled(DType::i32, shape, source.download_ints(rows));
    return filled(DType::f64, shape, source.download(rows));
  }
  /// A tensor in its own type; a copy only if it is not on the host.
  Tensor on_host(const harness::Buffer& source) {
    const Tensor& tensor = source.tensor();
    if (!tensor || tensor.device.kind == DeviceKind::cpu) return tensor;
    if (tensor.dtype == DType::i32)
      return filled(DType::i32, harness::shape_of(tensor), source.download_ints());
    return filled(tensor.dtype, harness::shape_of(tensor), source.download());
  }
  /// A call of a layer with its inputs on the host and outputs of its own.
  template <class Args>
  Args on_host(const Args& args, const harness::Buffers& layer) {
    return harness::layer_arguments<Args>(
        [&](std::string_view name, FieldRole role) {
          const harness::Buffer& source = layer.find(name);
          if (role == FieldRole::input || !source.tensor()) return on_host(source);
          return output(source.tensor().dtype, harness::shape_of(source.tensor()));
        },
        args);
  }
  /// |x| of a tensor that came from here, in double.
  Tensor magnitudes(const Tensor& tensor) {
    return filled(DType::f64, harness::shape_of(tensor), harness::magnitudes(values_of(tensor)));
  }
  template <class T>
  Tensor filled(DType dtype, const harness::Shape& shape, const std::vector<T>& values) {
    harness::Buffer& buffer = buffers_.emplace_back(Device{}, dtype, shape);
    buffer.upload(values);
    return buffer.tensor();
  }
  /// Numbers start as 0, for calls that add to them.
  Tensor output(DType dtype, const harness::Shape& shape) {
    harness::Buffer& buffer = buffers_.emplace_back(Device{}, dtype, shape);
    if (dtype != DType::i32)
      buffer.fill([](std::int64_t, std::span<double> elements) {
        std::fill(elements.begin(), elements.end(), 0.0);
      });
    return buffer.tensor();
  }

  /// That of a tensor that came from here.
  const harness::Buffer& buffer_of(const Tensor& tensor) const {
    return *std::find_if(buffers_.begin(), buffers_.end(), [&](const harness::Buffer& buffer) {
      return buffer.tensor().data == tensor.data;
    });
  }
  std::vector<double> values_of(const Tensor& tensor) const { return buffer_of(tensor).download(); }

 private:
  std::deque<harness::Buffer> buffers_;  // keeps its elements where they are
};

}  // namespace winnow::tools
