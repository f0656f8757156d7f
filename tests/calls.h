// SPDX-License-Identifier: Apache-2.0
// A call of any op in a uniform representation, so that tests can mutate it without knowing the op.
#pragma once

#include <cstddef>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "harness/workload.h"
#include "tests/testing.h"

namespace winnow::tests {

/// A tensor of a call. `memory` has eight bytes per element, so that a view with another type stays
/// within it.
struct Argument {
  const char* name;
  Tensor* tensor;  // in the argument struct
  Buffer memory;   // i32 words; empty if the tensor is absent
  bool is_output = false;

  std::byte* begin() const { return static_cast<std::byte*>(memory.tensor().data); }
};

/// A number of a call, and values that a test may set it to.
struct Number {
  const char* name;
  Values choices;
  std::function<void(double)> set;
};

struct Call {
  std::string_view op;
  std::shared_ptr<void> args;       // the argument struct
  std::vector<Argument> arguments;  // in its order; the first one determines types and ranks
  std::vector<Number> numbers;
  std::function<void(const Execution&)> run;
  std::function<std::size_t(const Execution&)> workspace_bytes;
  std::function<std::string(const Execution&)> why_not;

  Argument* find(std::string_view name) {
    for (Argument& argument : arguments)
      if (argument.name == name) return &argument;
    return nullptr;
  }
};

/// Builds a call from a seed; the same seed gives the same call.
class CallMaker {
 public:
  CallMaker(std::uint64_t seed, Device device) : random_(seed, "call"), device_(device) {}

  std::int64_t below(std::int64_t n) { return random_.below(draw_++, n); }
  std::int64_t between(std::int64_t least, std::int64_t most) {
    return least + below(most - least + 1);
  }
  bool perhaps() { return below(2) == 0; }
  template <class T>
  T one_of(std::initializer_list<T> choices) {
    return std::data(choices)[below(static_cast<std::int64_t>(choices.size()))];
  }

  template <class Args>
  Args& start(std::string_view op) {
    auto args = std::make_shared<Args>();
    call_ = {.op = op,
             .args = args,
             .arguments = {},
             .numbers = {},
             .run = [args](const Execution& e) { harness::run(*args, e); },
             .workspace_bytes = [args](const Execution& e) { return workspace_bytes(*args, e); },
             .why_not = [args](const Execution& e) { return why_not(*args, e); }};
    return *args;
  }
  Call finish() { return std::move(call_); }

  /// Adds an input of random multiples of `unit` in [-most, most] units, so that products are
  /// exact.
  void floats(const char* name, Tensor& tensor, DType dtype, const Shape& shape, std::int64_t most,
              double unit) {
    Values values(static_cast<std::size_t>(elements(shape)));
    for (double& value : values) value = unit * static_cast<double>(between(-most, most));
    add(name, tensor, dtype, shape, values, false);
  }
  /// The same with values in [0, most] units.
  void positives(const char* name, Tensor& tensor, DType dtype, const Shape& shape,
                 std::int64_t most, double unit) {
    Values values(static_cast<std::size_t>(elements(shape)));
    for (double& value : values) value = unit * static_cast<double>(between(0, most));
    add(name, tensor, dtype, shape, values, false);
  }
  void ints(const char* name, Tensor& tensor, const Shape& shape, const Ints& values) {
    std::vector<std::byte> bytes(values.size() * sizeof(std::int32_t));
    if (!values.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
    add(name, tensor, DType::i32, shape, bytes, false);
  }
  /// Adds an output, initialised with NaN.
  void output(const char* name, Tensor& tensor, DType dtype, const Shape& shape) {
    add(name, tensor, dtype, shape, std::vector<std::byte>{}, true);
  }
  /// Adds a gradient: of the accumulation type with values, to be added to, or of the activation
  /// type with NaN, to be overwritten.
  void sum(const char* name, Tensor& tensor, DType activation, const Shape& shape) {
    const DType sum_type = activation == DType::f64 ? DType::f64 : DType::f32;
    if (sum_type != activation && perhaps()) return output(name, tensor, activation, shape);
    Values values(static_cast<std::size_t>(elements(shape)));
    for (double& value : values) value = static_cast<double>(between(-4, 4)) / 64;
    add(name, tensor, sum_type, shape, values, true);
  }
  void absent(const char* name, Tensor& tensor, bool is_output = false) {
    call_.arguments.push_back({name, &tensor, {}, is_output});
  }
  template <class T>
  void number(const char* name, T& field, const Values& choices) {
    call_.numbers.push_back({name, choices, [&field](double value) {
                               if constexpr (std::is_enum_v<T>) {
                                 field = static_cast<T>(static_cast<std::int32_t>(value));
                               } else {
                                 field = static_cast<T>(value);
                               }
                             }});
  }

 private:
  void add(const char* name, Tensor& tensor, DType dtype, const Shape& shape, const Values& values,
           bool is_output) {
    std::vector<std::byte> bytes(values.size() * static_cast<std::size_t>(element_bytes(dtype)));
    harness::encode(dtype, values, bytes.data());
    add(name, tensor, dtype, shape, bytes, is_output);
  }
  void add(const char* name, Tensor& tensor, DType dtype, const Shape& shape,
           const std::vector<std::byte>& bytes, bool is_output) {
    Ints words(static_cast<std::size_t>(elements(shape) * 2),
               dtype == DType::i32 ? 0x7f7f7f7f : -1);
    if (!bytes.empty()) std::memcpy(words.data(), bytes.data(), bytes.size());
    Buffer memory(device_, DType::i32, {static_cast<std::int64_t>(words.size())});
    memory.upload(words);
    tensor = {.data = memory.tensor().data,
              .dtype = dtype,
              .device = device_,
              .rank = static_cast<std::int32_t>(shape.size())};
    std::int64_t stride = 1;
    for (std::size_t i = shape.size(); i-- > 0;) {
      tensor.shape[i] = shape[i];
      tensor.stride[i] = stride;
      stride *= shape[i];
    }
    call_.arguments.push_back({name, &tensor, std::move(memory), is_output});
  }

  Random random_;
  std::int64_t draw_ = 0;
  Device device_;
  Call call_;
};

}  // namespace winnow::tests
