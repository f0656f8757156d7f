// SPDX-License-Identifier: Apache-2.0
// Random: numbers by position, the same bits on every platform and standard library.
#pragma once

#include <cstdint>
#include <string_view>

namespace winnow::harness {

/// A stream of numbers; the i-th can be asked for alone, so that any part of an input can be made
/// anywhere. Only integer arithmetic and single exact or correctly rounded operations: no library
/// function, no a * b + c.
class Random {
 public:
  Random(std::uint64_t seed, std::string_view stream) : key_(mix(seed)) {
    for (const char letter : stream) key_ = mix(key_ ^ static_cast<unsigned char>(letter));
  }

  std::uint64_t bits(std::int64_t i) const {
    return mix(key_ + static_cast<std::uint64_t>(i) * 0x9e3779b97f4a7c15U);
  }
  /// In [0, 1).
  double uniform(std::int64_t i) const { return static_cast<double>(bits(i) >> 11) * 0x1p-53; }
  /// In [0, n), n > 0.
  std::int64_t below(std::int64_t i, std::int64_t n) const {
    return static_cast<std::int64_t>((bits(i) >> 32) * static_cast<std::uint64_t>(n) >> 32);
  }
  /// Mean 0, variance 1, within +-3.47: the sum of four uniform numbers, close enough to the normal
  /// distribution.
  double normal(std::int64_t i) const {
    const std::uint64_t word = bits(i);
    const auto sum = static_cast<std::int64_t>((word & 0xffff) + (word >> 16 & 0xffff) +
                                               (word >> 32 & 0xffff) + (word >> 48));
    return static_cast<double>(sum - 2 * 0xffff) / 37837.2269;  // sqrt((2^32 - 1) / 3)
  }

 private:
  static std::uint64_t mix(std::uint64_t x) {  // splitmix64
    x += 0x9e3779b97f4a7c15U;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9U;
    x = (x ^ x >> 27) * 0x94d049bb133111ebU;
    return x ^ x >> 31;
  }

  std::uint64_t key_;
};

}  // namespace winnow::harness
