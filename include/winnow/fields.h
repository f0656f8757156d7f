// SPDX-License-Identifier: Apache-2.0
// Reflection of argument structs. The static function fields() of a struct lists its members;
// bindings, tools and tests read that list.
#pragma once

#include <cstdint>

#include "winnow/tensor.h"

namespace winnow {

/// No output may share memory with another tensor of its call; inputs may share theirs.
enum class FieldRole : std::int32_t { input, output, option };

template <class Args, class Value>
struct Field {
  using Member = Value Args::*;

  const char* name;
  FieldRole role;
  Member member;
  const char* words = nullptr;  // for an enum: the names of its values in order, "a|b|c"
};

namespace fields {

template <class Args>
constexpr Field<Args, Tensor> input(const char* name, Tensor Args::*member) {
  return {name, FieldRole::input, member};
}
template <class Args>
constexpr Field<Args, Tensor> output(const char* name, Tensor Args::*member) {
  return {name, FieldRole::output, member};
}
template <class Args, class Value>
constexpr Field<Args, Value> option(const char* name, Value Args::*member,
                                    const char* words = nullptr) {
  return {name, FieldRole::option, member, words};
}

}  // namespace fields
}  // namespace winnow
