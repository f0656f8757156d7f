// SPDX-License-Identifier: Apache-2.0
// What every file with vector code includes before Highway: which targets are built, and sizes that
// hold on all of them.
#pragma once

#include <cstdint>

// Vectors whose length is not known to the compiler cannot stand in the arrays of a register tile.
// Machines with such vectors take the next target: NEON, or plain C++.
#ifndef __SANITIZE_ADDRESS__
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
#else
// Each target takes its time to compile with sanitizers, and those between say nothing more.
#define HWY_DISABLED_TARGETS \
  (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV | HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL)
#endif

#include <hwy/targets.h>

namespace winnow::cpu {

/// Columns of a packed matrix are padded to a multiple of this: two of the widest vectors, in
/// floats.
inline constexpr std::int64_t kColumnPadding = 32;

inline constexpr std::int64_t padded_columns(std::int64_t columns) {
  return (columns + kColumnPadding - 1) / kColumnPadding * kColumnPadding;
}

/// Floats from one row to the next of a padded matrix: an odd number of cache lines, so that a
/// column of it does not fall into a few sets of the cache.
inline constexpr std::int64_t padded_stride(std::int64_t columns) {
  return padded_columns(columns) + 16;
}

inline constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

}  // namespace winnow::cpu
