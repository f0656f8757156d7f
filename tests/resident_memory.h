// SPDX-License-Identifier: Apache-2.0
// The memory that this process has, for tests that nothing is kept from call to call.
#pragma once

#include <cstdint>
#include <fstream>

#include <unistd.h>

#include "tests/sanitized.h"
#include "tests/testing.h"

namespace winnow::tests {

/// The growth that tests allow: what allocators round up, far below a kilobyte a call.
inline constexpr std::int64_t kMaxGrowth = std::int64_t{2} << 20;

/// The resident size of this process, in bytes.
inline std::int64_t resident_bytes() {
  std::ifstream file("/proc/self/statm");
  std::int64_t pages = 0;
  std::int64_t resident_pages = 0;
  file >> pages >> resident_pages;
  return resident_pages * sysconf(_SC_PAGESIZE);
}

/// Repeats body() `times` times and expects that the process does not grow. What is made once is
/// made in a tenth as many repeats before.
template <class Body>
void expect_no_growth(int times, const Body& body) {
  for (int i = 0; i < times / 10; ++i) body();
  if (kSanitized) return;  // sanitizers keep memory of their own
  const std::int64_t before = resident_bytes();
  for (int i = 0; i < times; ++i) body();
  EXPECT_LE(resident_bytes() - before, kMaxGrowth) << "over " << times << " repeats";
}

}  // namespace winnow::tests
