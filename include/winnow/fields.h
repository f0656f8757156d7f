// SPDX-License-Identifier: Apache-2.0
// What an argument struct holds, member by member. Every such struct describes itself once, by a
// static function fields(); bindings, tools and tests read that description.
#pragma once

#include <cstdint>

#include "winnow/tensor.h"

namespace winnow {

enum class FieldRole : std::int32_t { input, output, option };

template <class Args, class Value>
struct Field {
  using Member = Value Args::*;

  const char* name;
  FieldRole role;
  Member member;
  const char* words = nullptr;  // of an enum: the names of its values in their order, "a|b|c"
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
