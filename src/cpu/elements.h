// SPDX-License-Identifier: Apache-2.0
// The elements that matmul-inl.h multiplies: floats, or pairs of bf16. Both have 32 bits, so
// that a matrix of pairs is packed and read like one of floats, with half of the depth.
#pragma once

#include <cstdint>

#include "cpu/simd.h"

namespace winnow::cpu {

/// Two bf16 that are neighbours along the depth of a product, the first one in the low half.
struct Bf16Pair {
  std::uint32_t bits;
};

/// The depth that an element stands for, in numbers.
template <class Element>
inline constexpr std::int64_t kElementDepth = 1;
template <>
inline constexpr std::int64_t kElementDepth<Bf16Pair> = 2;

/// Elements that hold `depth` numbers.
template <class Element>
constexpr std::int64_t elements_of(std::int64_t depth) {
  return ceil_div(depth, kElementDepth<Element>);
}

}  // namespace winnow::cpu
