// SPDX-License-Identifier: Apache-2.0
// The selection from a row by a thread block: one that has more keys than slots, or whose slots are
// to stand by score. Its candidates are in registers, in the order of their keys:
//   short rows  are candidates, all of their keys.
//   long rows   have more. Keys spread over the row tell a score that is likely below the bound. A
//               pass over the row marks what reaches it, one bit a key; those are the candidates.
//   Where that does not do, histograms of the whole row find the bound: with more slots than
//   registers, where the guess has left fewer candidates than slots or more than registers, and
//   where too many scores are close to the bound or infinite.
#pragma once

#include <cstdint>

#include "cuda/index_topk/bound.cuh"
#include "cuda/index_topk/row.cuh"

namespace winnow::cuda::index_topk {

inline constexpr int kBlockKeys = 32 * 4;  // that a warp looks at together, four neighbours a lane
// Blocks of keys whose marks are in shared memory at a time: few enough for the scores of all rows
// that are selected from at a time to be in the L2 cache still when those that are marked are read
// again.
inline constexpr int kMarkedBlocks = 128;
inline constexpr int kSample = 4;  // fours of a row that each thread looks at first
inline constexpr int kSampleKeys = kSample * 4 * kThreads;

/// What a block keeps of the row that it selects from.
template <int kEach>
struct RowStorage {
  static constexpr std::uint32_t kMost = kEach * kThreads;  // candidates
  SharedStorage bound;
  uint4 marks[kMarkedBlocks];   // of keys: bit i of word j is that of key 4 i + j of a block
  std::uint32_t places[kMost];  // of candidates, in the row
  float scores[kMost];
  std::uint32_t before[kEach * kWarps];  // slots before those of 32 neighbouring candidates
};

/// The range of all threads' scores. NaN are none.
template <int kCount>
__device__ Range range_of_scores(SharedStorage& shared, const float (&scores)[kCount]) {
  float low = INFINITY;
  float high = -INFINITY;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    low = fminf(low, scores[i]);
    high = fmaxf(high, scores[i]);
  }
  return range_of(shared, high > -INFINITY ? Range{image_of(low), image_of(high)} : kNothing);
}

template <int kCount>
__device__ void count_scores(SharedStorage& shared, const EvenBins& bins,
                             const float (&scores)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (can_be_selected(scores[i])) atomicAdd(&shared.bins[bins.bin(scores[i])], 1u);
  }
}

/// A score that more than topk keys of a row reach, as far as some of them can tell; NaN if they
/// cannot.
__device__ inline float likely_least(SharedStorage& shared, const Row& row, int topk) {
  // Runs of 16 keys, 64 bytes, at equal distances, in 2^32nds of a run; four lanes have one. More
  // of them for very long rows.
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
    for (int b = 0; b < kSample; ++b) {
      const float4 four = row.in_window(loaded[b], place(b));
      scores[4 * b] = four.x;
      scores[4 * b + 1] = four.y;
      scores[4 * b + 2] = four.z;
      scores[4 * b + 3] = four.w;
    }
#pragma unroll
    for (int i = 0; i < kSample * 4; ++i) {
      if (!can_be_selected(scores[i])) scores[i] = no_score();
    }
    if (round == 0) {
      clear_bins(shared);
      const Range range = range_of_scores(shared, scores);
      bins = EvenBins(range);
      if (range.low >= range.high || !bins.work()) return no_score();
    }
    count_scores(shared, bins, scores);
  }
  __syncthreads();
  // Four standard deviations more than their share.
  const float share = static_cast<float>(topk) * static_cast<float>(rounds * kSampleKeys) /
                      static_cast<float>(row.count());
  const auto wanted = static_cast<std::uint32_t>(share + 4 * sqrtf(share)) + 8;
  const WantedBin found = find_bin(shared, wanted);
  return found.all < wanted ? no_score() : bins.lowest(found.bin);
}

/// A bit for each lane and each of its four scores: whether it reaches `least`.
__device__ inline uint4 reaching(float4 four, float least) {
  return {__ballot_sync(kAllLanes, four.x >= least), __ballot_sync(kAllLanes, four.y >= least),
          __ballot_sync(kAllLanes, four.z >= least), __ballot_sync(kAllLanes, four.w >= least)};
}

/// Marks keys that reach `least`, of `blocks` blocks from `first` on.
__device__ inline void mark(uint4* marks, const Row& row, float least, std::uint32_t first,
                            std::uint32_t blocks) {
  constexpr int kLoads = 8;
  const std::uint32_t lane = threadIdx.x % 32;
  const std::uint32_t warp = threadIdx.x / 32;
  const auto* const fours = reinterpret_cast<const float4*>(row.scores + first * kBlockKeys) + lane;
  // The first and the last block may reach beyond the window. Loads without a condition are on
  // their way together: the last of the others is marked more than once.
  for (std::uint32_t block = 1 + warp; block < blocks - 1; block += kLoads * kWarps) {
    const auto number = [&](int b) { return min(block + b * kWarps, blocks - 2); };
    float4 loaded[kLoads];
#pragma unroll
    for (int b = 0; b < kLoads; ++b) loaded[b] = __ldcg(fours + number(b) * 32);
#pragma unroll
    for (int b = 0; b < kLoads; ++b) {
      const uint4 own = reaching(loaded[b], least);
      if (lane == 0) marks[number(b)] = own;
    }
  }
  if (warp < 2) {
    const std::uint32_t block = warp == 0 ? 0 : blocks - 1;
    const std::uint32_t place = (first + block) * kBlockKeys + lane * 4;
    float4 loaded[1];
    row.load(loaded, [&](int) { return place; });
    const uint4 own = reaching(row.in_window(loaded[0], place), least);
    if (lane == 0) marks[block] = own;
  }
}

/// All keys that reach `least` become candidates; returns how many they are, or more than kMost if
/// there are more.
template <int kEach>
__device__ std::uint32_t collect(RowStorage<kEach>& shared, const Row& row, float least) {
  std::uint32_t count = 0;
  const std::uint32_t all_blocks = (row.count() + kBlockKeys - 1) / kBlockKeys;
  for (std::uint32_t first = 0; first < all_blocks; first += kMarkedBlocks) {
    const std::uint32_t blocks = min(all_blocks - first, std::uint32_t{kMarkedBlocks});
    mark(shared.marks, row, least, first, blocks);
    __syncthreads();
    // A block for each thread.
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

/// Selects from `count` candidates, up to kEach for each thread, of which number i has the score
/// that `score(i)` gives and is at `place(i)`; returns how many, or -1 if scores are too close for
/// this.
template <int kEach, int kMostEach, class Score, class Place>
__device__ int select_from(RowStorage<kMostEach>& shared, const Row& row, const Slots& slots,
                           std::uint32_t count, Score score, Place place) {
  if (count == 0) return 0;
  const auto number = [](int n) { return static_cast<std::uint32_t>(n * kThreads + threadIdx.x); };
  float scores[kEach];
  // Loads without a condition are on their way together.
#pragma unroll
  for (int n = 0; n < kEach; ++n) scores[n] = score(min(number(n), count - 1));
#pragma unroll
  for (int n = 0; n < kEach; ++n) {
    if (number(n) >= count || !can_be_selected(scores[n])) scores[n] = no_score();
  }
  float least = -INFINITY;
  std::uint32_t last = 0;  // of those that equal it
  if (count > slots.topk) {
    clear_bins(shared.bound);
    const Range range = range_of_scores(shared.bound, scores);
    const EvenBins bins(range);
    if (range.low >= range.high || !bins.work()) return -1;
    count_scores(shared.bound, bins, scores);
    __syncthreads();
    const WantedBin found = find_bin(shared.bound, slots.topk);
    if (found.all > slots.topk) {
      if (found.of_bin > kFew) return -1;
#pragma unroll
      for (int n = 0; n < kEach; ++n) {
        if (can_be_selected(scores[n]) && bins.bin(scores[n]) == found.bin)
          add_few(shared.bound, image_of(scores[n]), number(n));
      }
      const Bound bound = bound_of_few(shared.bound, found.of_bin, slots.topk - found.above);
      least = score_of(bound.image);
      last = bound.last;
    }
  }
  // How many are before those of a warp.
  const int lane = static_cast<int>(threadIdx.x) % 32;
  std::uint32_t* const before = shared.before + threadIdx.x / 32;
  std::uint32_t kept = 0;  // a bit for each
#pragma unroll
  for (int n = 0; n < kEach; ++n) {
    const bool is_kept = scores[n] > least || (scores[n] == least && number(n) <= last);
    const unsigned lanes = __ballot_sync(kAllLanes, is_kept);
    if (is_kept) kept |= 1u << n;
    if (lane == 0) before[n * kWarps] = __popc(lanes);
  }
  __syncthreads();
  static_assert(kEach * kWarps <= kThreads && kEach <= 32);
  const bool has_sum = threadIdx.x < kEach * kWarps;
  const Prefix prefix = prefix_sum(shared.bound, has_sum ? shared.before[threadIdx.x] : 0);
  if (has_sum) shared.before[threadIdx.x] = prefix.before;
  __syncthreads();
#pragma unroll
  for (int n = 0; n < kEach; ++n) {
    const bool is_kept = kept >> n & 1;
    const unsigned lanes = __ballot_sync(kAllLanes, is_kept);
    const std::uint32_t slot = before[n * kWarps] + __popc(lanes & ((1u << lane) - 1));
    if (is_kept)
      slots.set(static_cast<int>(slot), row.first + static_cast<int>(place(number(n))), scores[n]);
  }
  return static_cast<int>(prefix.all);
}

/// Selects from a row for any number of slots and any scores; returns how many.
template <int kEach>
__device__ int select_many(RowStorage<kEach>& shared, const Row& row, const Slots& slots) {
  const auto image_at = [&](std::uint32_t i) { return row.sees(i) ? image_of(row.scores[i]) : 0; };
  const Bound bound = find_bound(shared.bound, slots.topk, [&](auto use) {
    for (std::uint32_t i = threadIdx.x; i < row.count(); i += kThreads) use(image_at(i), i);
  });
  int written = 0;
  for (std::uint32_t first = 0; first < row.count(); first += kThreads) {
    const std::uint32_t i = first + threadIdx.x;
    const std::uint32_t image = i < row.count() ? image_at(i) : 0;
    const bool is_kept = image != 0 && bound.keeps(image, i);
    const Prefix prefix = prefix_sum(shared.bound, is_kept ? 1 : 0);
    if (is_kept) {
      slots.set(written + static_cast<int>(prefix.before), row.first + static_cast<int>(i),
                score_of(image));
    }
    written += static_cast<int>(prefix.all);
  }
  return written;
}

/// Selects from a row; returns how many.
template <int kEach>
__device__ int select(RowStorage<kEach>& shared, const Row& row, const Slots& slots) {
  constexpr int kFewer = kEach * 3 / 4;  // as most rows have
  int written = -1;
  if (row.count() <= shared.kMost) {
    // The row may begin with up to three keys before the window.
    const std::uint32_t first = row.begin - row.first;
    written = select_from<kEach>(
        shared, row, slots, row.count() - first,
        [&](std::uint32_t i) { return row.scores[first + i]; },
        [&](std::uint32_t i) { return first + i; });
  } else if (slots.topk <= kFewer * kThreads) {  // the guess adds some
    const float least = likely_least(shared.bound, row, slots.topk);
    const std::uint32_t count = can_be_selected(least) ? collect(shared, row, least) : 0;
    const auto score = [&](std::uint32_t i) { return shared.scores[i]; };
    const auto place = [&](std::uint32_t i) { return shared.places[i]; };
    if (count >= slots.topk && count <= kFewer * kThreads) {
      written = select_from<kFewer>(shared, row, slots, count, score, place);
    } else if (count >= slots.topk && count <= shared.kMost) {
      written = select_from<kEach>(shared, row, slots, count, score, place);
    }
  }
  if (written < 0) written = select_many(shared, row, slots);
  return written;
}

}  // namespace winnow::cuda::index_topk
