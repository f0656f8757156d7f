// SPDX-License-Identifier: Apache-2.0
// The selection from a row by a thread block: a row that has more keys than slots, or whose slots
// are ordered by score. Its candidates are held in registers, in the order of their keys:
// clang-format off
//   short rows  All of their keys are candidates.
//   long rows   A sample of keys spread over the row gives a score that is likely below the bound.
//               A pass over the row marks the keys that reach it, one bit each; they are the
//               candidates.
// clang-format on
// Histograms of the whole row find the bound where that fails: with more slots than three quarters
// of the candidates, where the guess leaves fewer candidates than slots or too many, where too many
// scores are close to the bound, and where a score is infinite.
#pragma once

#include <cfloat>
#include <cstddef>
#include <cstdint>

#include "cuda/index_topk/bound.cuh"
#include "cuda/index_topk/row.cuh"

namespace winnow::cuda::index_topk {

inline constexpr int kBlockKeys = 32 * 4;  // that a warp reads together, four neighbours a lane
// Blocks of keys whose marks are in shared memory at a time. They are few enough that the scores of
// all rows in flight are still in L2 when the marked ones are read again.
inline constexpr int kMarkedBlocks = 128;
inline constexpr int kSample = 4;  // float4 of a row that each thread samples
inline constexpr int kSampleKeys = kSample * 4 * kThreads;

/// The shared memory of a block that selects from one row.
template <int kEach>
struct RowStorage {
  static constexpr std::uint32_t kMost = kEach * kThreads;  // candidates
  SharedStorage bound;
  uint4 marks[kMarkedBlocks];   // bit i of word j marks key 4 i + j of a block
  std::uint32_t places[kMost];  // of candidates, in the row
  float scores[kMost];
  std::uint32_t before[kEach * kWarps];  // slots before those of 32 neighbouring candidates
};

/// The range of all threads' scores, without NaN.
template <int kCount>
__device__ Range range_of_scores(SharedStorage& shared, const float (&scores)[kCount]) {
  float low = INFINITY;
  float high = -INFINITY;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    low = fminf(low, scores[i]);
    high = fmaxf(high, scores[i]);
  }
  return range_of(shared, low <= high ? Range{sort_key(low), sort_key(high)} : kNothing);
}

/// Counts scores in the bins that `position` gives them.
template <int kCount, class Position>
__device__ void count_scores(SharedStorage& shared, const float (&scores)[kCount],
                             Position position) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    atomicAdd(&shared.bins[EvenBins::bin(position(scores[i]))], 1u);
  }
}

/// A score that, judged by a sample, more than topk keys of the row reach; NaN if the sample cannot
/// tell. Where few of the sample are numbers it is so low that nearly all keys become candidates.
__device__ inline float likely_least(SharedStorage& shared, const Row& row, int topk) {
  // The sample is runs of 16 keys (64 bytes) at equal distances, counted in 2^-32 of a run; four
  // lanes read one run. Very long rows have more of them.
  constexpr std::uint32_t kKeysOfRound = 65536;
  const std::uint32_t rounds = (row.count() + kKeysOfRound - 1) / kKeysOfRound;
  const std::uint32_t runs = rounds * kSample * kThreads / 4;
  const std::uint64_t distance = (std::uint64_t{row.count() / 16} << 32) / runs;
  EvenBins bins;
  for (std::uint32_t round = 0; round < rounds; ++round) {
    const auto place = [&](int b) {
      const std::uint32_t number = (round * kSample + b) * kThreads + threadIdx.x;
      return static_cast<std::uint32_t>(number / 4 * distance >> 32) * 16 + number % 4 * 4;
    };
    float4 loaded[kSample];
    row.load(loaded, place);
    float scores[kSample * 4];
#pragma unroll
    for (int b = 0; b < kSample; ++b) spread(row.in_window(loaded[b], place(b)), scores + 4 * b);
    if (round == 0) {
      clear_bins(shared);
      const Range range = range_of_scores(shared, scores);
      bins = EvenBins(range);
      if (range.low >= range.high || !bins.work()) return no_score();
    }
    count_scores(shared, scores, [&](float score) { return bins.near_position(score); });
  }
  __syncthreads();
  // Four standard deviations more than the expected share.
  const float share = static_cast<float>(topk) * static_cast<float>(rounds * kSampleKeys) /
                      static_cast<float>(row.count());
  const auto wanted = static_cast<std::uint32_t>(share + 4 * sqrtf(share)) + 8;
  return bins.lowest(find_bin(shared, wanted).bin);
}

/// Which of each lane's four scores reach `least`, a bit a lane.
__device__ inline uint4 reaching(float4 four, float least) {
  return {__ballot_sync(kAllLanes, four.x >= least), __ballot_sync(kAllLanes, four.y >= least),
          __ballot_sync(kAllLanes, four.z >= least), __ballot_sync(kAllLanes, four.w >= least)};
}

/// Marks the keys that reach `least` in `blocks` blocks from `first` on.
__device__ inline void mark(uint4* marks, const Row& row, float least, std::uint32_t first,
                            std::uint32_t blocks) {
  constexpr int kLoads = 8;
  const std::uint32_t lane = threadIdx.x % 32;
  const std::uint32_t warp = threadIdx.x / 32;
  const auto* const fours = reinterpret_cast<const float4*>(row.scores + first * kBlockKeys) + lane;
  // Unconditional loads are in flight together.
  const auto mark_all = [&](auto number) {
    float4 loaded[kLoads];
#pragma unroll
    for (int b = 0; b < kLoads; ++b) loaded[b] = __ldcg(fours + number(b) * 32);
#pragma unroll
    for (int b = 0; b < kLoads; ++b) {
      const uint4 own = reaching(loaded[b], least);
      if (lane == 0) marks[number(b)] = own;
    }
  };
  // The first and the last block may reach beyond the window.
  const std::uint32_t last = blocks - 1;
  for (std::uint32_t block = 1 + warp; block < last; block += kLoads * kWarps) {
    if (block + (kLoads - 1) * kWarps < last) {
      mark_all([&](int b) { return std::size_t{block} + b * kWarps; });
    } else {  // the last block is marked more than once
      mark_all([&](int b) { return min(block + b * kWarps, last - 1); });
    }
  }
  if (warp < 2) {
    const std::uint32_t block = warp == 0 ? 0 : last;
    const std::uint32_t place = (first + block) * kBlockKeys + lane * 4;
    float4 loaded[1];
    row.load(loaded, [&](int) { return place; });
    const uint4 own = reaching(row.in_window(loaded[0], place), least);
    if (lane == 0) marks[block] = own;
  }
}

/// Makes all keys that reach `least` candidates; returns their number, or more than kMost if there
/// are more than that.
template <int kEach>
__device__ std::uint32_t collect(RowStorage<kEach>& shared, const Row& row, float least) {
  std::uint32_t count = 0;
  const std::uint32_t all_blocks = (row.count() + kBlockKeys - 1) / kBlockKeys;
  for (std::uint32_t first = 0; first < all_blocks; first += kMarkedBlocks) {
    const std::uint32_t blocks = min(all_blocks - first, std::uint32_t{kMarkedBlocks});
    mark(shared.marks, row, least, first, blocks);
    __syncthreads();
    // Each thread takes one block.
    static_assert(kMarkedBlocks <= kThreads);
    const uint4 marks = threadIdx.x < blocks ? shared.marks[threadIdx.x] : uint4{};
    const Prefix prefix = prefix_sum(
        shared.bound, __popc(marks.x) + __popc(marks.y) + __popc(marks.z) + __popc(marks.w));
    if (count + prefix.all > shared.kMost) return shared.kMost + 1;
    std::uint32_t to = count + prefix.before;
    for (unsigned lanes = marks.x | marks.y | marks.z | marks.w; lanes != 0; lanes &= lanes - 1) {
      const int lane = __ffs(static_cast<int>(lanes)) - 1;
      const std::uint32_t place = (first + threadIdx.x) * kBlockKeys + lane * 4;
      if (marks.x >> lane & 1) shared.places[to++] = place;
      if (marks.y >> lane & 1) shared.places[to++] = place + 1;
      if (marks.z >> lane & 1) shared.places[to++] = place + 2;
      if (marks.w >> lane & 1) shared.places[to++] = place + 3;
    }
    __syncthreads();
    for (std::uint32_t i = count + threadIdx.x; i < count + prefix.all; i += kThreads)
      shared.scores[i] = __ldcg(row.scores + shared.places[i]);
    count += prefix.all;
  }
  __syncthreads();
  return count;
}

/// Selects from `count` candidates, up to kEach a thread, in the order of their keys: `score(n)`
/// and `key(n)` are those of this thread's n-th. Returns how many were selected, or -1 if the
/// scores are too close to each other or too far apart for this method.
template <int kEach, int kMostEach, class Score, class Key>
__device__ int select_from(RowStorage<kMostEach>& shared, const Slots& slots, std::uint32_t count,
                           Score score, Key key) {
  const auto number = [](int n) { return static_cast<std::uint32_t>(n * kThreads + threadIdx.x); };
  float scores[kEach];
#pragma unroll
  for (int n = 0; n < kEach; ++n) scores[n] = number(n) < count ? score(n) : no_score();
  float least = -FLT_MAX;
  if (count > slots.topk) {
    clear_bins(shared.bound);
    const Range range = range_of_scores(shared.bound, scores);
    const EvenBins bins(range);
    if (range.low >= range.high || !bins.work()) return -1;
    count_scores(shared.bound, scores, [&](float score) { return bins.position(score); });
    __syncthreads();
    const WantedBin found = find_bin(shared.bound, slots.topk);
    if (found.all > slots.topk) {
      if (found.of_bin > kFew) return -1;
      std::uint32_t in_bin = 0;  // bit n: this thread's n-th is in the bound's bin
#pragma unroll
      for (int n = 0; n < kEach; ++n) {
        if (bins.position(scores[n]) == EvenBins::position_of(found.bin)) in_bin |= 1u << n;
      }
      for (; in_bin != 0; in_bin &= in_bin - 1) {
        const int n = __ffs(static_cast<int>(in_bin)) - 1;
        add_few(shared.bound, sort_key(score(n)), number(n));
      }
      const Bound bound = bound_of_few(shared.bound, found.of_bin, slots.topk - found.above);
      least = score_of(bound.sort_key);
      if (bound.last != kLastNumber) {
#pragma unroll
        for (int n = 0; n < kEach; ++n) {
          if (scores[n] == least && number(n) > bound.last) scores[n] = no_score();
        }
      }
    }
  }
  // Count how many are kept before those of each warp.
  static_assert(kEach * kWarps <= kThreads && kEach <= 32);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  std::uint32_t* const before = shared.before + threadIdx.x / 32;
  unsigned own = 0;  // in lane n: which lanes keep their n-th
#pragma unroll
  for (int n = 0; n < kEach; ++n) {
    const unsigned lanes = __ballot_sync(kAllLanes, scores[n] >= least);
    if (lane == n) own = lanes;
  }
  if (lane < kEach) before[lane * kWarps] = __popc(own);
  __syncthreads();
  const bool has_sum = threadIdx.x < kEach * kWarps;
  const Prefix prefix = prefix_sum(shared.bound, has_sum ? shared.before[threadIdx.x] : 0);
  if (has_sum) shared.before[threadIdx.x] = prefix.before;
  __syncthreads();
#pragma unroll
  for (int n = 0; n < kEach; ++n) {
    const bool is_kept = scores[n] >= least;
    const unsigned lanes = __ballot_sync(kAllLanes, is_kept);
    const std::uint32_t slot = before[n * kWarps] + __popc(lanes & ((1u << lane) - 1));
    if (is_kept) slots.set(slot, key(n), scores[n]);
  }
  return static_cast<int>(prefix.all);
}

/// Selects from a row with any number of slots and any scores; returns how many.
template <int kEach>
__device__ int select_many(RowStorage<kEach>& shared, const Row& row, const Slots& slots) {
  const auto key_at = [&](std::uint32_t i) { return row.sees(i) ? sort_key(row.scores[i]) : 0; };
  const Bound bound = find_bound(shared.bound, slots.topk, [&](auto use) {
    for (std::uint32_t i = threadIdx.x; i < row.count(); i += kThreads) use(key_at(i), i);
  });
  int written = 0;
  for (std::uint32_t first = 0; first < row.count(); first += kThreads) {
    const std::uint32_t i = first + threadIdx.x;
    const std::uint32_t key = i < row.count() ? key_at(i) : 0;
    const bool is_kept = key != 0 && bound.keeps(key, i);
    const Prefix prefix = prefix_sum(shared.bound, is_kept ? 1 : 0);
    if (is_kept) {
      slots.set(written + static_cast<int>(prefix.before), row.first + static_cast<int>(i),
                score_of(key));
    }
    written += static_cast<int>(prefix.all);
  }
  return written;
}

/// Selects from a row; returns how many.
template <int kEach>
__device__ int select(RowStorage<kEach>& shared, const Row& row, const Slots& slots) {
  constexpr int kFewer = kEach * 3 / 4;  // enough for most rows
  const auto select_from_candidates = [&](std::uint32_t count, auto score, auto key) {
    return count <= kFewer * kThreads ? select_from<kFewer>(shared, slots, count, score, key)
                                      : select_from<kEach>(shared, slots, count, score, key);
  };
  int written = -1;
  if (row.count() <= shared.kMost) {
    // The scores may begin with up to three keys before the window.
    const int first_key = row.begin + static_cast<int>(threadIdx.x);
    const float* const scores = row.scores + (first_key - row.first);
    written = select_from_candidates(
        row.end - row.begin, [&](int n) { return __ldcg(scores + n * kThreads); },
        [&](int n) { return first_key + n * kThreads; });
  } else if (slots.topk <= kFewer * kThreads) {  // the guess gives more candidates than slots
    const float least = likely_least(shared.bound, row, slots.topk);
    const std::uint32_t count = can_be_selected(least) ? collect(shared, row, least) : 0;
    if (count >= slots.topk && count <= shared.kMost) {
      written = select_from_candidates(
          count, [&](int n) { return shared.scores[n * kThreads + threadIdx.x]; },
          [&](int n) {
            return row.first + static_cast<int>(shared.places[n * kThreads + threadIdx.x]);
          });
    }
  }
  if (written < 0) written = select_many(shared, row, slots);
  return written;
}

}  // namespace winnow::cuda::index_topk
