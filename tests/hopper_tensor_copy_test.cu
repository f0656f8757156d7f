// SPDX-License-Identifier: Apache-2.0
// Boxes of tensors loaded by TMA against plain loops: each row of a box is at its position in the
// tile layout, and elements outside the tensor are zero.
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>

#include "cuda/common/tensor_map.h"
#include "cuda/hopper/barrier.cuh"
#include "cuda/hopper/tensor_copy.cuh"
#include "cuda/hopper/wgmma.cuh"
#include "tests/hopper_kernels.cuh"

namespace winnow::tests {
namespace {

using namespace winnow::hopper;

constexpr int kMaxRows = 256;  // of 128 bytes
constexpr unsigned kPoison = 0xffffffffu;

/// The coordinates of a box in the order of the tensor's dimensions; those past its rank are
/// unused.
struct Coordinates {
  int of[4];
};

struct BoxStorage {
  std::byte tile[kMaxRows * kTileRowBytes];
  Barrier full;
  Watchdog watchdog;
};

/// Loads a box into shared memory filled with a pattern, then stores all rows of it.
template <int kRank>
__global__ void box_kernel(const __grid_constant__ CUtensorMap map, Coordinates start,
                           int box_bytes, uint4* rows) {
  extern __shared__ __align__(1024) std::byte memory[];
  auto& shared = *reinterpret_cast<BoxStorage*>(memory);
  const int thread = static_cast<int>(threadIdx.x);
  if (thread == 0) {
    prefetch(map);
    shared.full.init(1);
    fence_barrier_init();
    shared.watchdog.init();
  }
  __syncthreads();
  if (thread >= kWarpgroup) {
    if (thread == kWarpgroup) shared.watchdog.watch(kWarpgroup);
    return;
  }
  for (int i = thread; i < kMaxRows * kTileRowBytes / 4; i += kWarpgroup)
    reinterpret_cast<unsigned*>(shared.tile)[i] = kPoison;
  fence_proxy_async();  // orders the writes of TMA after the fill
  sync_warps<1, kWarpgroup>();
  if (thread == 0) {
    shared.full.arrive_and_expect(box_bytes);
    if constexpr (kRank == 2) {
      copy_box(shared.tile, map, shared.full, start.of[1], start.of[0]);
    } else if constexpr (kRank == 3) {
      copy_box(shared.tile, map, shared.full, start.of[2], start.of[1], start.of[0]);
    } else {
      copy_box(shared.tile, map, shared.full, start.of[3], start.of[2], start.of[1], start.of[0]);
    }
  }
  shared.full.wait(0);
  for (int i = thread; i < kMaxRows * 8; i += kWarpgroup)
    rows[i] = *reinterpret_cast<const uint4*>(shared.tile + tile_offset(i / 8, i % 8));
  shared.watchdog.finish();
}

using Box = std::array<std::uint32_t, 4>;
/// The element of a tensor at coordinates inside it.
using Element = std::function<double(const Coordinates&)>;

/// The expected rows of a box in the order of its dimensions, then the fill pattern.
Values plain_box(const Tensor& tensor, const Box& box, const Coordinates& start,
                 const Element& element) {
  std::int64_t count = 1;
  for (int i = 0; i < tensor.rank; ++i) count *= box[i];
  Values values;
  for (std::int64_t number = 0; number < count; ++number) {
    Coordinates at = start;
    std::int64_t rest = number;
    bool is_inside = true;
    for (int i = tensor.rank - 1; i >= 0; --i) {
      at.of[i] += static_cast<int>(rest % box[i]);
      rest /= box[i];
      is_inside = is_inside && at.of[i] >= 0 && at.of[i] < tensor.shape[i];
    }
    values.push_back(is_inside ? element(at) : 0);
  }
  values.resize(static_cast<std::size_t>(kMaxRows * kTileRowBytes / element_bytes(tensor.dtype)),
                kNaN);
  return values;
}

template <int kRank>
void expect_plain_box(const Tensor& tensor, const Box& box, const Coordinates& start,
                      const Element& element) {
  const ::testing::ScopedTrace trace(
      __FILE__, __LINE__,
      fmt::format("box at {}, {}, {}, {}", start.of[0], start.of[1], start.of[2], start.of[3]));
  ASSERT_EQ(tensor.rank, kRank);
  ASSERT_TRUE(cuda::can_have_tensor_map(tensor));
  int box_bytes = static_cast<int>(element_bytes(tensor.dtype));
  for (int i = 0; i < kRank; ++i) box_bytes *= static_cast<int>(box[i]);
  const Buffer rows(kDevice, tensor.dtype, {kMaxRows, kTileRowBytes / element_bytes(tensor.dtype)});
  run_block(box_kernel<kRank>, kWarpgroup + Watchdog::kThreads, sizeof(BoxStorage),
            cuda::make_tensor_map(tensor, box), start, box_bytes,
            static_cast<uint4*>(rows.tensor().data));
  EXPECT_TRUE(same_bits(rows.download(), plain_box(tensor, box, start, element)));
  expect_canaries_intact(rows);
}

/// Non-zero values that are exact in every type. Canaries are between the rows.
struct Input {
  Values values;
  Buffer buffer;

  Input(DType dtype, const Shape& shape)
      : values(whole_numbers(elements(shape), 1, "tensor", 1, 15)),
        buffer(floats(kDevice, dtype, shape, values, 16)) {}
};

std::uint32_t columns_of(DType dtype) {
  return static_cast<std::uint32_t>(kTileRowBytes / element_bytes(dtype));
}

class TensorCopy : public OnHopper {};

// As the indexer loads keys: the last boxes extend past the rows and the columns. Boxes begin at
// 16-byte boundaries, as the instruction asks.
TEST_F(TensorCopy, FillsBoxesOfAMatrix) {
  constexpr int kRows = 100;
  constexpr int kColumns = 144;
  for (const DType dtype : {DType::bf16, DType::f16, DType::f8_e4m3}) {
    const Input input(dtype, {kRows, kColumns});
    for (const Coordinates& start :
         {Coordinates{0, 0}, Coordinates{36, 16}, Coordinates{60, 0}, Coordinates{64, 128},
          Coordinates{99, 128}, Coordinates{-3, -16}, Coordinates{200, 0}}) {
      expect_plain_box<2>(
          input.buffer.tensor(), {64, columns_of(dtype)}, start,
          [&](const Coordinates& at) { return input.values[at.of[0] * kColumns + at.of[1]]; });
    }
  }
}

// As backward loads q and d_out: all heads of one query, fewer than the rows of the box.
TEST_F(TensorCopy, FillsBoxesOfHeads) {
  constexpr int kTokens = 3;
  constexpr int kColumns = 192;
  for (const int heads : {40, 64, 72}) {
    const Input input(DType::bf16, {kTokens, heads, kColumns});
    for (const Coordinates& start : {Coordinates{0, 0, 0}, Coordinates{2, 0, 128},
                                     Coordinates{1, 64, 64}, Coordinates{3, 0, 0}}) {
      expect_plain_box<3>(
          input.buffer.tensor(), {1, 64, columns_of(DType::bf16)}, start,
          [&](const Coordinates& at) {
            return input.values[(at.of[0] * heads + at.of[1]) * kColumns + at.of[2]];
          });
    }
  }
}

// As the indexer loads queries: heads in two dimensions, not in the order of their strides.
TEST_F(TensorCopy, FillsBoxesOfAPermutedTensor) {
  constexpr int kTokens = 10;
  constexpr int kColumns = 128;
  for (const DType dtype : {DType::bf16, DType::f8_e4m3}) {
    for (const int heads : {64, 48}) {
      const Input input(dtype, {kTokens, heads, kColumns});
      const Tensor& q = input.buffer.tensor();
      Tensor view = q;
      view.rank = 4;
      view.shape = {heads / 2, kTokens, 2, kColumns};
      view.stride = {q.stride[1], q.stride[0], heads / 2 * q.stride[1], 1};
      for (const Coordinates& start : {Coordinates{0, 0, 0, 0}, Coordinates{0, 8, 0, 64},
                                       Coordinates{0, 9, 0, 0}, Coordinates{20, 4, 1, 0}}) {
        expect_plain_box<4>(view, {32, 4, 2, columns_of(dtype)}, start, [&](const Coordinates& at) {
          const int head = at.of[2] * heads / 2 + at.of[0];
          return input.values[(at.of[1] * heads + head) * kColumns + at.of[3]];
        });
      }
    }
  }
}

constexpr int kStages = 2;
constexpr int kBlocks = 50;
constexpr int kBlockRows = 32;
constexpr int kBlockBytes = kBlockRows * kTileRowBytes;

struct RingStorage {
  std::byte stages[kStages][kBlockBytes];
  std::int32_t first_row[kStages];
  Barrier full[kStages];
  Barrier free[kStages];
  Watchdog watchdog;
};

/// A producer warp passes boxes, last first, to a warpgroup. As in the indexer every lane of the
/// producer arrives, and one of them also with the expected bytes of TMA.
__global__ void ring_kernel(const __grid_constant__ CUtensorMap map, uint4* to) {
  constexpr int kThreads = kWarpgroup + 32;
  extern __shared__ __align__(1024) std::byte memory[];
  auto& shared = *reinterpret_cast<RingStorage*>(memory);
  const int thread = static_cast<int>(threadIdx.x);
  if (thread == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      shared.full[stage].init(32);
      shared.free[stage].init(kWarpgroup);
    }
    fence_barrier_init();
    shared.watchdog.init();
  }
  __syncthreads();
  if (thread >= kThreads) {
    if (thread == kThreads) shared.watchdog.watch(kThreads);
    return;
  }
  for (int block = 0; block < kBlocks; ++block) {
    const int stage = block % kStages;
    const int round = block / kStages;
    if (thread >= kWarpgroup) {
      shared.free[stage].wait(round - 1);
      if (thread == kWarpgroup) {
        const int first_row = (kBlocks - 1 - block) * kBlockRows;
        shared.first_row[stage] = first_row;
        shared.full[stage].expect(kBlockBytes);
        copy_box(shared.stages[stage], map, shared.full[stage], 0, first_row);
      }
      shared.full[stage].arrive();
    } else {
      shared.full[stage].wait(round);
      for (int i = thread; i < kBlockRows * 8; i += kWarpgroup) {
        to[shared.first_row[stage] * 8 + i] =
            *reinterpret_cast<const uint4*>(shared.stages[stage] + tile_offset(i / 8, i % 8));
      }
      wait_for_own_loads();
      shared.free[stage].arrive();
    }
  }
  shared.watchdog.finish();
}

TEST_F(TensorCopy, PassesBoxesThroughARing) {
  constexpr int kRows = kBlocks * kBlockRows;
  constexpr int kShort = 5;  // rows of the last box past the end of the tensor
  const Input input(DType::bf16, {kRows - kShort, kTileColumns});
  const Buffer to(kDevice, DType::bf16, {kRows, kTileColumns});
  run_block(ring_kernel, kWarpgroup + 32 + Watchdog::kThreads, sizeof(RingStorage),
            cuda::make_tensor_map(input.buffer.tensor(), {kBlockRows, kTileColumns}),
            static_cast<uint4*>(to.tensor().data));
  Values expected = input.values;
  expected.resize(kRows * kTileColumns, 0);
  EXPECT_TRUE(same_bits(to.download(), expected));
  expect_canaries_intact(to);
}

}  // namespace
}  // namespace winnow::tests
