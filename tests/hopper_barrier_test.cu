// SPDX-License-Identifier: Apache-2.0
// mbarriers and named barriers over many phases, and setmaxnreg between warpgroups. A wrong phase
// gives wrong data or a deadlock, which the watchdog ends.
#include <cstddef>
#include <cstdint>

#include "cuda/hopper/barrier.cuh"
#include "cuda/hopper/gather.cuh"
#include "cuda/hopper/wgmma.cuh"
#include "tests/hopper_kernels.cuh"

namespace winnow::tests {
namespace {

using namespace winnow::hopper;

constexpr int kStages = 3;
constexpr int kBlocks = 200;  // passed through the ring: each stage is used some 66 times
constexpr int kBlockWords = 4 * kWarpgroup;
constexpr int kConsumers = 2 * kWarpgroup;
constexpr int kRingThreads = kWarpgroup + kConsumers;

/// How the producers fill a stage.
enum class Filling { stores, copies };

struct RingStorage {
  std::int32_t stages[kStages][kBlockWords];
  Barrier full[kStages];
  Barrier free[kStages];
  Watchdog watchdog;
};

/// Delays threads in turn, so that the ring is sometimes full and sometimes empty.
__device__ void dawdle(int block, int role) {
  if ((block / 8 + role) % 2 == 0) __nanosleep(static_cast<unsigned>(block % 5) * 500);
}

/// A producer warpgroup passes the blocks of `from` to two consumer warpgroups, which write them to
/// `to`. No word is read by the thread that loaded it.
template <Filling kFilling>
__global__ void ring_kernel(const std::int32_t* from, std::int32_t* to) {
  extern __shared__ __align__(1024) std::byte memory[];
  auto& shared = *reinterpret_cast<RingStorage*>(memory);
  const int thread = static_cast<int>(threadIdx.x);
  if (thread == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      shared.full[stage].init(kWarpgroup);
      shared.free[stage].init(kConsumers / 32);
    }
    fence_barrier_init();
    shared.watchdog.init();
  }
  __syncthreads();
  if (thread >= kRingThreads) {
    if (thread == kRingThreads) shared.watchdog.watch(kRingThreads);
    return;
  }
  for (int block = 0; block < kBlocks; ++block) {
    const int stage = block % kStages;
    const int round = block / kStages;
    if (thread < kWarpgroup) {
      dawdle(block, 0);
      // Waits until the consumers have read the stage; initially (phase -1) it is free.
      shared.free[stage].wait(round - 1);
      const std::int32_t* const words = from + block * kBlockWords + thread * 4;
      std::int32_t* const target = shared.stages[stage] + thread * 4;
      if constexpr (kFilling == Filling::copies) {
        copy_16_bytes(shared_address(target), words, true);
        shared.full[stage].arrive_after_copies();
      } else {
        for (int i = 0; i < 4; ++i) target[i] = words[i];
        shared.full[stage].arrive();
      }
    } else {
      dawdle(block, 1);
      shared.full[stage].wait(round);
      for (int word = thread - kWarpgroup; word < kBlockWords; word += kConsumers)
        to[block * kBlockWords + word] = shared.stages[stage][word];
      __syncwarp();  // one arrival for the reads of 32 lanes
      if (thread % 32 == 0) shared.free[stage].arrive();
    }
  }
  shared.watchdog.finish();
}

/// All words differ, so that data of another round or stage is detected.
Ints numbered(int count) {
  Ints words(static_cast<std::size_t>(count));
  for (int i = 0; i < count; ++i) words[static_cast<std::size_t>(i)] = i;
  return words;
}

template <Filling kFilling>
void expect_blocks_pass_the_ring() {
  const Ints words = numbered(kBlocks * kBlockWords);
  const Buffer from = ints(kDevice, {kBlocks, kBlockWords}, words);
  const Buffer to(kDevice, DType::i32, {kBlocks, kBlockWords});
  run_block(ring_kernel<kFilling>, kRingThreads + Watchdog::kThreads, sizeof(RingStorage),
            static_cast<const std::int32_t*>(from.tensor().data),
            static_cast<std::int32_t*>(to.tensor().data));
  EXPECT_EQ(to.download_ints(), words);
  expect_canaries_intact(from, to);
}

class Barriers : public OnHopper {};

TEST_F(Barriers, PassStoredBlocksThroughARing) { expect_blocks_pass_the_ring<Filling::stores>(); }

TEST_F(Barriers, PassCopiedBlocksThroughARing) { expect_blocks_pass_the_ring<Filling::copies>(); }

struct TurnStorage {
  std::uint32_t words[kWarpgroup];
  Watchdog watchdog;
};

/// Two warpgroups update the same words in turn, each word by another thread every time.
__global__ void turns_kernel(std::int32_t* words) {
  constexpr int kBoth = 2 * kWarpgroup;
  extern __shared__ __align__(1024) std::byte memory[];
  auto& shared = *reinterpret_cast<TurnStorage*>(memory);
  const int thread = static_cast<int>(threadIdx.x);
  if (thread == 0) shared.watchdog.init();
  if (thread < kWarpgroup) shared.words[thread] = 0;
  __syncthreads();
  if (thread >= kBoth) {
    if (thread == kBoth) shared.watchdog.watch(kBoth);
    return;
  }
  // Barrier 1 lets the first warpgroup in, barrier 2 the second: one arrives, the other waits.
  const bool is_first = thread < kWarpgroup;
  if (!is_first) arrive_warps<1, kBoth>();
  for (int turn = 0; turn < kBlocks; ++turn) {
    is_first ? sync_warps<1, kBoth>() : sync_warps<2, kBoth>();
    std::uint32_t& word = shared.words[(thread + turn * 33) % kWarpgroup];
    word = word * 3 + (is_first ? 1 : 2);  // depends on the order of updates
    dawdle(turn, is_first);
    if (is_first) {
      arrive_warps<2, kBoth>();
    } else if (turn + 1 < kBlocks) {
      arrive_warps<1, kBoth>();
    }
  }
  if (!is_first) {
    sync_warps<3, kWarpgroup>();  // the words of the last turn were written by other threads
    words[thread - kWarpgroup] = static_cast<std::int32_t>(shared.words[thread - kWarpgroup]);
  }
  shared.watchdog.finish();
}

TEST_F(Barriers, LetTwoWarpgroupsTakeTurns) {
  const Buffer words(kDevice, DType::i32, {kWarpgroup});
  run_block(turns_kernel, 2 * kWarpgroup + Watchdog::kThreads, sizeof(TurnStorage),
            static_cast<std::int32_t*>(words.tensor().data));
  std::uint32_t expected = 0;
  for (int turn = 0; turn < kBlocks; ++turn) expected = (expected * 3 + 1) * 3 + 2;
  EXPECT_EQ(words.download_ints(), Ints(kWarpgroup, static_cast<std::int32_t>(expected)));
}

constexpr int kRegisterValues = 192;  // per thread: more than the 168 registers of the launch
constexpr int kRegisterThreads = 3 * kWarpgroup;

/// Warpgroup 0 releases registers, warpgroup 1 acquires them and keeps many values in them,
/// warpgroup 2 is the watchdog. Without the release warpgroup 1 would wait forever, since 3 x 168
/// of 512 registers are allocated.
__global__ void __launch_bounds__(kRegisterThreads, 1)
    registers_kernel(const float* from, float* to) {
  extern __shared__ __align__(1024) std::byte memory[];
  auto& watchdog = *reinterpret_cast<Watchdog*>(memory);
  const int thread = static_cast<int>(threadIdx.x);
  if (thread == 0) watchdog.init();
  __syncthreads();
  if (thread < kWarpgroup) {
    shrink_registers<40>();
    watchdog.finish();
  } else if (thread < 2 * kWarpgroup) {
    grow_registers<240>();
    float values[kRegisterValues];
#pragma unroll
    for (int i = 0; i < kRegisterValues; ++i)
      values[i] = from[i * kWarpgroup + thread % kWarpgroup];
    // Every value is used twice with all others in between, so that all are live at once.
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kRegisterValues; ++i) sum += values[i];
#pragma unroll
    for (int i = 0; i < kRegisterValues; ++i)
      to[i * kWarpgroup + thread % kWarpgroup] = values[i] + sum;
    watchdog.finish();
  } else if (thread == 2 * kWarpgroup) {
    watchdog.watch(2 * kWarpgroup);
  }
}

TEST_F(Barriers, RegistersMoveBetweenWarpgroups) {
  const Values values = whole_numbers(kRegisterValues * kWarpgroup, 1, "values", 1, 1000);
  const Buffer from = floats(kDevice, DType::f32, {kRegisterValues, kWarpgroup}, values);
  const Buffer to(kDevice, DType::f32, {kRegisterValues, kWarpgroup});
  run_block(registers_kernel, kRegisterThreads, sizeof(Watchdog),
            static_cast<const float*>(from.tensor().data), static_cast<float*>(to.tensor().data));
  Values expected = values;
  for (int thread = 0; thread < kWarpgroup; ++thread) {
    double sum = 0;
    for (int i = 0; i < kRegisterValues; ++i) sum += values[i * kWarpgroup + thread];
    for (int i = 0; i < kRegisterValues; ++i) expected[i * kWarpgroup + thread] += sum;
  }
  EXPECT_TRUE(same_bits(to.download(), expected));
}

}  // namespace
}  // namespace winnow::tests
