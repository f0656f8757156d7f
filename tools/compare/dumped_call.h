// SPDX-License-Identifier: Apache-2.0
// DumpedCall: one call of an operator, read from a file.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "harness/arguments.h"
#include "harness/memory.h"
#include "tools/compare/file_format.h"

namespace winnow::dump {

struct TypeAndShape {
  DType dtype = DType::f32;
  harness::Shape shape;
};

struct DumpedCall {
  std::string op;
  std::vector<FormatField> fields;  // an output that the options make an input is one here
  std::map<std::string, harness::Buffer, std::less<>> tensors;  // stored, in host memory
  std::map<std::string, TypeAndShape, std::less<>> outputs;     // that the call writes
  std::map<std::string, double, std::less<>> options;           // a word is its number
  std::string ran_on;  // backend and kernel that made the stored outputs, if the file says so

  /// Null where the file does not hold the tensor.
  const harness::Buffer* find(std::string_view name) const {
    const auto found = tensors.find(name);
    return found == tensors.end() ? nullptr : &found->second;
  }
  /// The argument struct, whose tensors are find(field); options are the file's.
  template <Arguments Args, class Find>
  Args arguments(const Find& find) const {
    Args args;
    std::size_t i = 0;
    for_each_field<Args>([&]<class Value>(const Field<Args, Value>& field) {
      const FormatField& described = fields[i++];
      if constexpr (std::is_same_v<Value, Tensor>) {
        args.*field.member = find(described);
      } else if (const auto option = options.find(field.name); option != options.end()) {
        args.*field.member = static_cast<Value>(option->second);
      }
    });
    return args;
  }
};

/// Throws FileError for a file whose tensors and metadata are not those of one operator. That they
/// fit each other is for the operator to say. Memory: that of the tensors and a constant.
DumpedCall read_call(const std::string& path);

}  // namespace winnow::dump
