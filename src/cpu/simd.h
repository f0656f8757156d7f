// SPDX-License-Identifier: Apache-2.0
// Included by every file with vector code before Highway: which SIMD targets are built, and sizes
// that are the same on all of them.
#pragma once

#include <cstdint>

// Vectors whose length is unknown at compile time cannot be elements of the array that is a
// register tile. Machines with such vectors use the next target: NEON, or plain C++.
#ifndef __SANITIZE_ADDRESS__
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
#else
// Targets take long to compile with sanitizers, and these would test nothing new.
#define HWY_DISABLED_TARGETS \
  (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV | HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL)
#endif

#include <hwy/targets.h>

namespace winnow::cpu {

/// The columns of a packed matrix are padded to a multiple of this: two of the widest vectors.
inline constexpr std::int64_t kColumnPadding = 32;

inline constexpr std::int64_t padded_columns(std::int64_t columns) {
  return (columns + kColumnPadding - 1) / kColumnPadding * kColumnPadding;
}

/// Row stride of a padded matrix in elements: an odd number of cache lines, so that the rows of a
/// column do not map to a few sets of the cache.
inline constexpr std::int64_t padded_stride(std::int64_t columns) {
  return padded_columns(columns) + 16;
}

inline constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

}  // namespace winnow::cpu
