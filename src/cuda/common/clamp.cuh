// SPDX-License-Identifier: Apache-2.0
// Keeps values that come from the caller's device memory inside the arrays.
#pragma once

#include <cstdint>

namespace winnow::cuda {

/// x, but not below `least` nor above `most`.
__device__ inline std::int64_t clamp(std::int64_t x, std::int64_t least, std::int64_t most) {
  return x < least ? least : x > most ? most : x;
}

}  // namespace winnow::cuda
