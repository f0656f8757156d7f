// SPDX-License-Identifier: Apache-2.0
// The first operand of a product in registers: rows loaded from device memory as fragments.
#pragma once

#include <cstdint>

#include "cuda/hopper/quad.cuh"

namespace winnow::hopper {

/// 64 rows of kTiles * 64 two-byte channels over the registers of a warpgroup. Lane 4g + c of warp
/// w holds parts of rows 16w + g and 16w + g + 8.
template <int kTiles>
struct RowFragments {
  std::uint32_t words[kTiles * 4][4];  // per 16 channels

  /// Issues the loads of the lane's two rows, of zeros for null; until `arrange` the words are in
  /// the order of memory.
  __device__ void load(const void* const (&rows)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto* const row = static_cast<const uint4*>(rows[half]) + threadIdx.x % 4;
#pragma unroll
      for (int i = 0; i < 2 * kTiles; ++i) {  // 32 channels at a time: two fragments
        uint4 loaded{0, 0, 0, 0};
        if (rows[half] != nullptr) loaded = __ldg(row + 4 * i);
        words[2 * i][half] = loaded.x;
        words[2 * i][half + 2] = loaded.y;
        words[2 * i + 1][half] = loaded.z;
        words[2 * i + 1][half + 2] = loaded.w;
      }
    }
  }

  __device__ void arrange() {
#pragma unroll
    for (int i = 0; i < 2 * kTiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        std::uint32_t quad[4] = {words[2 * i][half], words[2 * i][half + 2], words[2 * i + 1][half],
                                 words[2 * i + 1][half + 2]};
        transpose_in_quad(quad);
        words[2 * i][half] = quad[0];
        words[2 * i][half + 2] = quad[1];
        words[2 * i + 1][half] = quad[2];
        words[2 * i + 1][half + 2] = quad[3];
      }
    }
  }
};

}  // namespace winnow::hopper
