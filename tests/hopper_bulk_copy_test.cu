// SPDX-License-Identifier: Apache-2.0
// Bulk copies from shared to device memory: rows are stored or added at their places and nothing
// beside them is touched. The numbers are whole, so that sums do not depend on their order.
#include <cstddef>
#include <cstdint>

#include "cuda/hopper/barrier.cuh"
#include "cuda/hopper/bulk_copy.cuh"
#include "cuda/hopper/wgmma.cuh"
#include "tests/hopper_kernels.cuh"

namespace winnow::tests {
namespace {

using namespace winnow::hopper;

constexpr int kRows = 16;     // of shared memory, one a lane
constexpr int kStride = 136;  // of shared memory, in floats
constexpr int kTargets = 9;
constexpr int kRounds = 3;

/// Emits every row `kRounds` times, each time from shared memory that was written anew.
template <bool kAdds>
__global__ void emit_kernel(const float* rows, const std::int32_t* targets, float* out, int dim) {
  extern __shared__ __align__(16) std::byte memory[];
  auto& shared = *reinterpret_cast<float(*)[kRows][kStride]>(memory);
  const int lane = static_cast<int>(threadIdx.x);
  for (int round = 0; round < kRounds; ++round) {
    for (int i = lane; i < kRows * dim; i += 32) shared[i / dim][i % dim] = rows[i] + round;
    fence_proxy_async();
    __syncwarp();
    if (lane < kRows && targets[lane] >= 0) {
      float* const to = out + std::int64_t{targets[lane]} * dim;
      const int bytes = dim * static_cast<int>(sizeof(float));
      if constexpr (kAdds) {
        add_bulk(to, shared[lane], bytes);
      } else {
        store_bulk(to, shared[lane], bytes);
      }
    }
    commit_bulk();
    wait_for_bulk_reads();
    __syncwarp();  // all rows have been read
  }
}

template <bool kAdds>
void expect_rows_at_their_places(int dim, const Ints& targets) {
  const Values values = whole_numbers(kRows * dim, 1, "rows", -100, 100);
  Values expected = whole_numbers(kTargets * dim, 2, "out", -100, 100);
  const Buffer rows = floats(kDevice, DType::f32, {kRows, dim}, values);
  const Buffer places = ints(kDevice, {kRows}, targets);
  const Buffer out = floats(kDevice, DType::f32, {kTargets, dim}, expected);
  run_block(emit_kernel<kAdds>, 32, sizeof(float) * kRows * kStride,
            static_cast<const float*>(rows.tensor().data),
            static_cast<const std::int32_t*>(places.tensor().data),
            static_cast<float*>(out.tensor().data), dim);
  for (int row = 0; row < kRows; ++row) {
    if (targets[row] < 0) continue;
    for (int d = 0; d < dim; ++d) {
      double& element = expected[targets[row] * dim + d];
      const double value = values[row * dim + d];
      element = kAdds ? element + kRounds * value + 3 : value + kRounds - 1;
    }
  }
  EXPECT_TRUE(same_bits(out.download(), expected));
  expect_canaries_intact(rows, places, out);
}

class BulkCopy : public OnHopper {};

TEST_F(BulkCopy, AddsRowsWithSeveralToOnePlace) {
  for (const int dim : {128, 64, 8}) {
    expect_rows_at_their_places<true>(dim, {0, 1, 1, 1, -1, 5, 0, 8, 8, -1, 3, 3, 3, 3, 3, 2});
  }
}

TEST_F(BulkCopy, StoresTheLastOfSeveralRounds) {
  for (const int dim : {128, 64, 8}) {
    expect_rows_at_their_places<false>(dim,
                                       {4, -1, 0, 8, -1, 5, -1, -1, -1, -1, 3, 2, -1, -1, -1, 1});
  }
}

}  // namespace
}  // namespace winnow::tests
