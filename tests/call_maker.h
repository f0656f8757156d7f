// SPDX-License-Identifier: Apache-2.0
// A call of any op in a uniform representation, so that tests can mutate it without knowing the op.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "tests/testing.h"

namespace winnow::tests {

/// A tensor of a call. `memory` has eight bytes per element, so that a view with another type stays
/// within it.
struct Argument {
  const char* name;
  Tensor* tensor;  // in the argument struct
  Buffer memory;   // i32 words; empty if the tensor is absent
  bool is_output = false;
  bool is_placed = false;            // by a mutation, so that no other type or stride would fit
  const Argument* within = nullptr;  // the argument whose memory the tensor is in; null: its own

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

  /// A call of the operator, which fill(maker, args) makes legal.
  template <class Args>
  Call make() {
    const auto args = std::make_shared<Args>();
    call_ = {.op = Args::kOperator,
             .args = args,
             .arguments = {},
             .numbers = {},
             .run = [args](const Execution& e) { winnow::run(*args, e); },
             .workspace_bytes = [args](const Execution& e) { return workspace_bytes(*args, e); },
             .why_not = [args](const Execution& e) { return why_not(*args, e); }};
    for_each_field<Args>([&]<class Value>(const Field<Args, Value>& field) {
      Value& member = (*args).*field.member;
      if constexpr (std::is_same_v<Value, Tensor>) {
        call_.arguments.push_back({field.name, &member, {}});
      } else {
        call_.numbers.push_back({field.name, choices_for<Value>(),
                                 [&member](double value) { member = static_cast<Value>(value); }});
      }
    });
    fill(*this, *args);
    return std::move(call_);
  }

  // These give a tensor of the arguments its memory; others stay absent.

  /// An input of random multiples of `unit` in [-most, most] units, so that products are exact.
  void floats(Tensor& tensor, DType dtype, const Shape& shape, std::int64_t most, double unit) {
    numbers(tensor, dtype, shape, -most, most, unit);
  }
  /// The same with values in [0, most] units.
  void positives(Tensor& tensor, DType dtype, const Shape& shape, std::int64_t most, double unit) {
    numbers(tensor, dtype, shape, 0, most, unit);
  }
  void ints(Tensor& tensor, const Shape& shape, const Ints& values) {
    give(tensor, DType::i32, shape, std::as_bytes(std::span(values)));
  }
  /// An output, initialised with NaN.
  void output(Tensor& tensor, DType dtype, const Shape& shape) {
    give(tensor, dtype, shape, {}).is_output = true;
  }
  /// A gradient: of the accumulation type with values, to be added to, or of the activation type
  /// with NaN, to be overwritten.
  void sum(Tensor& tensor, DType activation, const Shape& shape) {
    const DType sum_type = type_of_sums(activation);
    if (sum_type != activation && perhaps()) return output(tensor, activation, shape);
    numbers(tensor, sum_type, shape, -4, 4, 1.0 / 64).is_output = true;
  }

 private:
  /// Values that are worth a try, whatever the option means.
  template <class Value>
  static Values choices_for() {
    if constexpr (std::is_same_v<Value, bool>) {
      return {1};  // without replay inputs would be outputs
    } else if constexpr (std::is_same_v<Value, float>) {
      return {kNaN, kInfinity, -kInfinity, 0, -0.5, 0.125};
    } else {
      return {-1, 0, 1, 2, 3, kMinInt32, kMaxInt32};
    }
  }

  Argument& numbers(Tensor& tensor, DType dtype, const Shape& shape, std::int64_t least,
                    std::int64_t most, double unit) {
    Values values(static_cast<std::size_t>(elements(shape)));
    for (double& value : values) value = unit * static_cast<double>(between(least, most));
    std::vector<std::byte> bytes(values.size() * static_cast<std::size_t>(element_bytes(dtype)));
    harness::encode(dtype, values, bytes.data());
    return give(tensor, dtype, shape, bytes);
  }
  Argument& give(Tensor& tensor, DType dtype, const Shape& shape,
                 std::span<const std::byte> bytes) {
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
    Argument& argument = *std::find_if(call_.arguments.begin(), call_.arguments.end(),
                                       [&](const Argument& a) { return a.tensor == &tensor; });
    argument.memory = std::move(memory);
    return argument;
  }

  Random random_;
  std::int64_t draw_ = 0;
  Device device_;
  Call call_;
};

}  // namespace winnow::tests
