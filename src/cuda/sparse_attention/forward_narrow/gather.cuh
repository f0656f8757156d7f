// SPDX-License-Identifier: Apache-2.0
// The narrow forward kernel's shared memory, its teams of warps, and the gather of keys into a
// team's ring.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "cuda/common/mma.cuh"
#include "cuda/sparse_attention/parameters.cuh"

namespace winnow::cuda::sparse_attention::forward_narrow {

inline constexpr int kWarps = 4;
inline constexpr int kThreads = kWarps * 32;
inline constexpr int kBlockKeys = 16;
inline constexpr int kLanesPerRow = 8;  // lanes that copy one row together
inline constexpr int kVector = 8;       // elements of a 16-byte copy
inline constexpr unsigned kAllLanes = 0xffffffffu;
inline constexpr unsigned kAllKeys = (1u << kBlockKeys) - 1;
// By this much a row's base may lag behind its largest score. A score is below 2 log2(e) in log2,
// so that P stays below 2^15, which f16 holds.
inline constexpr float kMaxLag = 5;

/// kDim: qk_dim up to a multiple of 64. kTeam: warps that share keys.
template <class T, int kDim, int kTeam>
struct Shape {
  static constexpr int kHeads = kTeam * 16;
  static constexpr int kTeams = kWarps / kTeam;
  static constexpr int kStages = kTeam == 1 && kDim > 192 ? 3 : 4;
  static constexpr int kRow = kDim + kRowPadding;  // elements, in a stage and of an accumulator
  static constexpr int kRingElements = kStages * kBlockKeys * kRow;
  // Minimum resident blocks per SM (`__launch_bounds__`).
  static constexpr int kMinBlocks = kDim > 128 ? 2 : kDim > 64 ? 3 : 4;

  /// What the teams tell each other of their rows at the end.
  struct alignas(16) Storage {
    float largest[kTeams][kHeads];
    float base[kTeams][kHeads];
    float sum[kTeams][kHeads];
    float normalizer[kHeads];
  };
  // The rings [kTeams, kRingElements] follow it; at the end, in their place, the teams'
  // accumulators of out [kTeams, kHeads, kRow] in fp32.
  static constexpr std::size_t kRingBytes = sizeof(T) * kTeams * kRingElements;
  static constexpr std::size_t kSumBytes = sizeof(float) * kTeams * kHeads * kRow;
  static constexpr std::size_t kSharedBytes = sizeof(Storage) + std::max(kRingBytes, kSumBytes);
};

/// A barrier of one team: what its threads wrote before is visible to all of them after it.
template <int kTeam>
__device__ void wait_for_team(int team) {
  if constexpr (kTeam == 1) {
    __syncwarp();
  } else if constexpr (kTeam == kWarps) {
    __syncthreads();
  } else {
    // The numbers of the barriers are constants: for a variable the compiler reserves all 16.
    static_assert(kWarps / kTeam == 2);
    if (team == 0) {
      asm volatile("bar.sync 1, %0;" ::"n"(kTeam * 32) : "memory");
    } else {
      asm volatile("bar.sync 2, %0;" ::"n"(kTeam * 32) : "memory");
    }
  }
}

/// Gathers the rows of a team's blocks into its ring.
template <class T, int kDim, int kTeam>
class Gather {
 public:
  using Shape = forward_narrow::Shape<T, kDim, kTeam>;

  /// `warp` is counted within the team.
  __device__ Gather(const ForwardParameters& parameters, const std::int32_t* indices, int slots,
                    T* ring, int team, int warp, int lane)
      : parameters_(parameters),
        indices_(indices),
        slots_(static_cast<std::uint32_t>(slots)),
        slot_(static_cast<std::uint32_t>(team * kBlockKeys + lane % kBlockKeys)),
        row_(warp * kRowsOfWarp + lane / kLanesPerRow),
        column_(lane % kLanesPerRow * kVector),
        to_(shared_address(ring + row_ * Shape::kRow + column_)) {
    load_index();
  }

  /// Starts the copies of the next block, whose indices were loaded one block ago, into the next
  /// stage; a block without keys commits an empty group. Returns the slots that hold a key, a bit
  /// each.
  __device__ unsigned start() {
    constexpr int kChunk = kLanesPerRow * kVector;
    const std::int32_t key = index_ < parameters_.keys ? index_ : -1;
    const unsigned keys = __ballot_sync(kAllLanes, key >= 0) & kAllKeys;
    if (keys != 0) {
      const T* const kv = static_cast<const T*>(parameters_.kv) + column_;
      const bool has_last = kDim - kChunk + column_ < parameters_.qk_dim;
      const std::uint32_t stage =
          to_ + stage_ * (kBlockKeys * Shape::kRow * static_cast<int>(sizeof(T)));
#pragma unroll
      for (int i = 0; i < kBlockKeys; i += kRowsOfTeam) {
        const std::int32_t s = __shfl_sync(kAllLanes, key, row_ + i);
        const bool valid = s >= 0;
        const T* const from = kv + max(s, 0) * parameters_.kv_stride;
        const std::uint32_t to = stage + i * Shape::kRow * static_cast<int>(sizeof(T));
#pragma unroll
        for (int d = 0; d < kDim - kChunk; d += kChunk) {
          copy_or_clear_16_bytes_async(to + d * static_cast<int>(sizeof(T)), from + d, valid);
        }
        if (has_last) {
          constexpr int d = kDim - kChunk;
          copy_or_clear_16_bytes_async(to + d * static_cast<int>(sizeof(T)), from + d, valid);
        }
      }
    }
    commit_copies();
    stage_ = stage_ + 1 == Shape::kStages ? 0 : stage_ + 1;
    slot_ += Shape::kTeams * kBlockKeys;
    load_index();
    return keys;
  }

 private:
  static constexpr int kRowsOfWarp = 32 / kLanesPerRow;
  static constexpr int kRowsOfTeam = kRowsOfWarp * kTeam;

  /// Only issues the load; using the value here would stall.
  __device__ void load_index() {
    index_ = -1;
    if (slot_ < slots_) index_ = indices_[slot_];
  }

  const ForwardParameters& parameters_;
  const std::int32_t* indices_;
  std::uint32_t slots_;
  std::uint32_t slot_;  // of the next block; lanes 16 to 31 have those of lanes 0 to 15
  int row_;             // the first of this lane in a block
  int column_;          // and where in the row
  std::uint32_t to_;    // the same in the first stage
  int stage_ = 0;       // of the next block
  std::int32_t index_;  // of slot_
};

}  // namespace winnow::cuda::sparse_attention::forward_narrow
