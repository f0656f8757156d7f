// SPDX-License-Identifier: Apache-2.0
// Check: validates the arguments of a call, one after another, with one form of error message.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <fmt/format.h>

#include "core/refusals.h"
#include "winnow/error.h"
#include "winnow/tensor.h"

namespace winnow {

using DTypes = std::initializer_list<DType>;
/// Names of dimensions. A name that appears twice in a call must have the same size both times.
using Dims = std::initializer_list<const char*>;

/// The element types of activations. f64 is for gradient checks on the reference backend.
inline constexpr DTypes kActivationTypes = {DType::bf16, DType::f16, DType::f32, DType::f64};

/// What counts of rows, keys, heads and channels have to fit into.
inline constexpr std::int64_t kMaxInt32 = std::numeric_limits<std::int32_t>::max();
/// The most slots of a row: kernels count them by blocks in int32, past the end of the last block.
inline constexpr std::int64_t kMaxTopk = std::int64_t{1} << 30;

/// The type in which sums over activations are accumulated, and that of lse, weights, scores and
/// gradients that are added to.
inline DType accumulation_type(DType activation) {
  return activation == DType::f64 ? DType::f64 : DType::f32;
}

/// Formats a device: "cpu" or "cuda:1".
std::string describe(Device device);

/// Every function throws Error(invalid_argument) if the argument is not valid.
class Check {
 public:
  explicit Check(std::string_view op) : op_(op) {}

  void input(const char* argument, const Tensor& tensor, Dims dims, DTypes dtypes);
  void output(const char* argument, const Tensor& tensor, Dims dims, DTypes dtypes);
  void optional_input(const char* argument, const Tensor& tensor, Dims dims, DTypes dtypes);
  void optional_output(const char* argument, const Tensor& tensor, Dims dims, DTypes dtypes);

  /// Expects one more leading dimension of this name on every tensor checked from here on.
  void set_leading_dim(std::optional<const char*> name) { leading_dim_ = name; }

  /// The size of a dimension that a tensor checked before has bound.
  std::int64_t dim(std::string_view name) const;
  void dim_in_range(std::string_view name, std::int64_t least, std::int64_t most) const;
  void dim_multiple_of(std::string_view name, std::int64_t factor) const;

  /// Checks a number or an enum.
  void in_range(const char* argument, std::int64_t value, std::int64_t least,
                std::int64_t most) const;
  void finite(const char* argument, double value) const;

  /// The common device of all tensors checked so far, of which there is at least one.
  Device device() const { return device_; }
  bool on_host() const { return device_.kind == DeviceKind::cpu; }

  /// Throws "op: argument given: sentence", where `sentence` comes from core/refusals.h.
  template <class... Values>
  [[noreturn]] void fail(std::string_view argument, std::string_view given, const char* sentence,
                         const Values&... values) const {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("{}: {} {}: {}", op_, argument, given,
                            fmt::format(fmt::runtime(sentence), values...)));
  }

 private:
  struct BoundDim {
    std::string_view name;
    std::int64_t size;
    const char* argument;
    const Tensor* tensor;  // owned by the argument struct
  };

  void check(const char* argument, const Tensor& tensor, Dims dims, DTypes dtypes);
  void bind(const char* argument, const Tensor& tensor, std::string_view name, std::int64_t size);
  const BoundDim& bound(std::string_view name) const;
  /// Null if no tensor has bound the dimension.
  const BoundDim* find(std::string_view name) const;

  std::string_view op_;
  std::optional<const char*> leading_dim_;
  std::vector<BoundDim> dims_;
  Device device_;
  const char* device_argument_ = nullptr;
};

}  // namespace winnow
