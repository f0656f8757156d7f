// SPDX-License-Identifier: Apache-2.0
// spread: the rows of which something is looked at where all would take too long.
#pragma once

#include <algorithm>
#include <cstdint>

#include "harness/memory.h"

namespace winnow::tools {

/// At most `count` numbers below n, evenly spread from 0 to n - 1.
inline harness::Rows spread(std::int64_t n, std::int64_t count) {
  harness::Rows numbers;
  count = std::min(n, count);
  for (std::int64_t i = 0; i < count; ++i)
    numbers.push_back(i * (n - 1) / std::max<std::int64_t>(count - 1, 1));
  return numbers;
}

}  // namespace winnow::tools
