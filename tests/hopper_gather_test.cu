// SPDX-License-Identifier: Apache-2.0
// Gathers by cp.async at the tile sizes of the kernels: rows of keys arrive at the positions of the
// tile layout, and an invalid index gives zeros without a read.
#include <cstddef>
#include <cstdint>

#include "cuda/hopper/barrier.cuh"
#include "cuda/hopper/gather.cuh"
#include "cuda/hopper/wgmma.cuh"
#include "tests/hopper_kernels.cuh"

namespace winnow::tests {
namespace {

using namespace winnow::hopper;

constexpr int kKeys = 40;
constexpr std::int32_t kUnmapped = 1 << 30;  // as a row index it is terabytes past the keys
constexpr unsigned kPoison = 0xffffffffu;    // two NaN

/// How threads wait for the rows.
enum class Arrival { barrier, own_copies };

template <int kBytes>
struct SharedStorage {
  std::byte stage[kBytes];
  std::byte behind[1024];
  Barrier landed;
  Watchdog watchdog;
};

/// Gathers kRows rows of kTiles tiles, then stores the stage row by row, and the memory after it.
/// The address of a row is not clamped if its index is invalid.
template <int kRows, int kTiles, Arrival kArrival>
__global__ void gather_kernel(const __nv_bfloat16* keys, const std::int32_t* indices,
                              __nv_bfloat16* rows, __nv_bfloat16* behind) {
  constexpr int kTileBytes = kRows * kTileRowBytes;
  extern __shared__ __align__(1024) std::byte memory[];
  auto& shared = *reinterpret_cast<SharedStorage<kTiles * kTileBytes>*>(memory);
  const int thread = static_cast<int>(threadIdx.x);
  if (thread == 0) {
    shared.landed.init(kWarpgroup);
    shared.watchdog.init();
  }
  __syncthreads();
  if (thread >= kWarpgroup) {
    if (thread == kWarpgroup) shared.watchdog.watch(kWarpgroup);
    return;
  }
  constexpr int kWords = (kTiles * kTileBytes + sizeof(shared.behind)) / 4;
  for (int i = thread; i < kWords; i += kWarpgroup)
    reinterpret_cast<unsigned*>(shared.stage)[i] = kPoison;
  sync_warps<1, kWarpgroup>();

  const int piece = thread % 8;
  for (int row = thread / 8; row < kRows; row += kWarpgroup / 8) {
    const std::int32_t key = indices[row];
    const __nv_bfloat16* const source =
        keys + std::int64_t{key} * kTiles * kTileColumns + piece * 8;
    for (int tile = 0; tile < kTiles; ++tile) {
      copy_16_bytes(shared_address(shared.stage) + tile * kTileBytes + tile_offset(row, piece),
                    source + tile * kTileColumns, key >= 0 && key < kKeys);
    }
  }
  if constexpr (kArrival == Arrival::barrier) {
    shared.landed.arrive_after_copies();
    shared.landed.wait(0);
  } else {
    wait_for_own_copies();
    sync_warps<1, kWarpgroup>();
  }

  for (int i = thread; i < kRows * kTiles * 8; i += kWarpgroup) {
    const int row = i / (kTiles * 8);
    const int tile = i / 8 % kTiles;
    reinterpret_cast<uint4*>(rows)[i] =
        *reinterpret_cast<const uint4*>(shared.stage + tile * kTileBytes + tile_offset(row, i % 8));
  }
  for (int i = thread; i < static_cast<int>(sizeof(shared.behind)) / 16; i += kWarpgroup)
    reinterpret_cast<uint4*>(behind)[i] = reinterpret_cast<const uint4*>(shared.behind)[i];
  shared.watchdog.finish();
}

/// Keys in random order, some repeated, with the given invalid indices in between.
Ints indices_with_holes(int count, const Ints& holes) {
  Ints indices;
  for (int i = 0; i < count; ++i) {
    indices.push_back(i % 3 == 2 ? holes[i / 3 % holes.size()] : i * 7 % kKeys);
  }
  return indices;
}

template <int kRows, int kTiles, Arrival kArrival>
void expect_rows_and_zeros(const Ints& indices) {
  constexpr std::int64_t kColumns = kTiles * kTileColumns;
  const Values values = whole_numbers(kKeys * kColumns, 1, "keys", 1, 255);
  // NaN before and after the keys would show if an invalid index were read.
  Values surrounded(kColumns, kNaN);
  surrounded.insert(surrounded.end(), values.begin(), values.end());
  surrounded.insert(surrounded.end(), kColumns, kNaN);
  const Buffer keys = floats(kDevice, DType::bf16, {kKeys + 2, kColumns}, surrounded);
  const Buffer slots = ints(kDevice, {kRows}, indices);
  const Buffer rows(kDevice, DType::bf16, {kRows, kColumns});
  const Buffer behind(kDevice, DType::bf16, {512});
  using Storage = SharedStorage<kRows * kTiles * kTileRowBytes>;
  run_block(gather_kernel<kRows, kTiles, kArrival>, kWarpgroup + Watchdog::kThreads,
            sizeof(Storage), static_cast<const __nv_bfloat16*>(keys.tensor().data) + kColumns,
            static_cast<const std::int32_t*>(slots.tensor().data),
            static_cast<__nv_bfloat16*>(rows.tensor().data),
            static_cast<__nv_bfloat16*>(behind.tensor().data));
  Values expected;
  for (const std::int32_t key : indices) {
    const bool is_key = key >= 0 && key < kKeys;
    const Values row = is_key ? part(values, key * kColumns, kColumns) : Values(kColumns, 0);
    expected.insert(expected.end(), row.begin(), row.end());
  }
  EXPECT_TRUE(same_bits(rows.download(), expected));
  EXPECT_TRUE(all_equal(behind.download(), kNaN));
  expect_canaries_intact(keys, slots, rows, behind);
}

template <int kRows, int kTiles>
void expect_rows_and_zeros() {
  for (const Ints& indices :
       {indices_with_holes(kRows, {-1, kKeys}), Ints(kRows, -1), Ints(kRows, 3)}) {
    expect_rows_and_zeros<kRows, kTiles, Arrival::barrier>(indices);
    expect_rows_and_zeros<kRows, kTiles, Arrival::own_copies>(indices);
  }
}

class Gather : public OnHopper {};

TEST_F(Gather, WritesZerosForHolesInBlocksOfTheForward) {
  expect_rows_and_zeros<48, 8>();
  expect_rows_and_zeros<48, 9>();
}

TEST_F(Gather, WritesZerosForHolesInBlocksOfTheBackward) {
  expect_rows_and_zeros<64, 8>();
  expect_rows_and_zeros<64, 9>();
}

// The tiles of Q that are not in registers, of 512 and of 576 channels.
TEST_F(Gather, WritesZerosForHeadsPastTheLast) {
  expect_rows_and_zeros<64, 3>();
  expect_rows_and_zeros<64, 4>();
}

// A read of such an address would end the launch with an error.
TEST_F(Gather, ReadsNoMemoryForHoles) {
  expect_rows_and_zeros<64, 9, Arrival::barrier>(
      indices_with_holes(64, {kUnmapped, -kUnmapped, -1}));
}

}  // namespace
}  // namespace winnow::tests
