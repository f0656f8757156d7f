// SPDX-License-Identifier: Apache-2.0
// The selection from a row by a thread block: a row that has more keys than slots, or whose slots
// are ordered by score. Its candidates are held in registers, in the order of their keys:
// clang-format off
//   short rows  All of their keys are candidates.
//   long rows   The row's sample (plan.cuh) gives a score that is likely below the bound. A pass
//               over the row marks the keys that reach it, one bit each; they are the candidates.
//               Where many keys have exactly that score, only the first of these are.
// clang-format on
// The sample is spread over the row, so that neighbours which are alike do not mislead. Where
// scores are too close to each other for the first method, the bound of the candidates is found by
// histograms in shared memory. Histograms of the whole row find it with more slots than that method
// has room for, and where two guesses leave fewer candidates than slots or too many, which is a
// matter of chance and rare.
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

/// The shared memory of a block that selects from one row.
template <int kEach>
struct RowStorage {
  static constexpr std::uint32_t kMost = kEach * kThreads;  // candidates
  SharedStorage bound;
  // Bit i of word j marks key 4 i + j of a block: those that reach the guess, and those above it.
  uint4 marks[kMarkedBlocks];
  uint4 above[kMarkedBlocks];
  std::uint32_t places[kMost];  // of candidates, in the row
  alignas(16) float scores[kMost];
  std::uint32_t before[kEach * kWarps];  // slots before those of 32 neighbouring candidates
};

/// The most slots for which a guess leaves room.
template <int kEach>
inline constexpr int kMostGuessed = kEach* kThreads * 9 / 16;

/// Values in shared memory.
struct HeldValues {
  const float* values;
  std::uint32_t count;  // padded with NaN to a multiple of 4
  __device__ float4 four(std::uint32_t i) const {
    return *reinterpret_cast<const float4*>(values + i);
  }
};

/// All scores of a row.
struct RowValues {
  Row row;
  std::uint32_t count;
  __device__ float4 four(std::uint32_t i) const { return row.in_window(row.four_scores(i), i); }
};

/// The sample of a row.
struct SampleValues {
  const float* sample;
  std::uint32_t count;
  __device__ float2 two(std::uint32_t i) const {
    return i < count ? __ldcg(reinterpret_cast<const float2*>(sample + i))
                     : float2{no_score(), no_score()};
  }
  __device__ float4 four(std::uint32_t i) const {
    const float2 low = two(i);
    const float2 high = two(i + 2);
    return {low.x, low.y, high.x, high.y};
  }
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
  return range_of(shared, {sort_key(low), sort_key(high)});
}

/// How candidates are guessed from a sample.
struct Guess {
  float keys_each;       // keys of the row that a key of the sample stands for
  std::uint32_t wanted;  // keys of the sample that reach the guess
  std::uint32_t most;    // candidates
  float topk;
  __device__ Guess(const Row& row, int slots, std::uint32_t most_candidates)
      : keys_each(static_cast<float>(row.count()) / static_cast<float>(row.sample_count)),
        most(most_candidates),
        topk(static_cast<float>(slots)) {
    const float share = topk / keys_each;
    wanted = static_cast<std::uint32_t>(share + margin(share));
  }
  /// What chance hardly adds to an expected number or takes from it.
  __device__ static float margin(float expected) { return 4 * sqrtf(expected) + 8; }
  /// Whether there is room for the keys that reach a score, if so many of the sample do.
  __device__ bool has_room(std::uint32_t reaching) const {
    return static_cast<float>(reaching) * keys_each <= 0.85f * static_cast<float>(most);
  }
};

/// A score that, judged by the sample, more than topk keys of the row reach, but not many more, on
/// any scores. Candidates are the keys above it and the first `equal` of those that have it.
__device__ __noinline__ Bound bound_of_sample(SharedStorage& shared, SampleValues sample,
                                              Guess guess) {
  const Quantile quantile = find_quantile(shared, sample, guess.wanted);
  if (guess.has_room(quantile.above + quantile.equal)) return {quantile.value, kAllEqual};
  // As many equal ones as may be selected if chance took too many of the larger ones.
  const auto above = static_cast<float>(quantile.above);
  const float surely_above = (above - Guess::margin(above)) * guess.keys_each;
  return {quantile.value, static_cast<std::uint32_t>(guess.topk - fmaxf(surely_above, 0.0f))};
}

/// The same, at first by one histogram, of which bins of the sample's range are fine enough for
/// most rows.
__device__ inline Bound likely_bound(SharedStorage& shared, const SampleValues& sample,
                                     const Guess& guess) {
  constexpr int kLoads = 8;
  const std::uint32_t pairs = sample.count / 2;
  const std::uint32_t rounds = (pairs + kLoads * kThreads - 1) / (kLoads * kThreads);
  EvenBins bins;
  for (std::uint32_t round = 0; round < rounds; ++round) {
    // Each round has pairs of the whole row, so that the first one's range is that of all.
    const auto pair = [&](int b) { return (b * kThreads + threadIdx.x) * rounds + round; };
    float2 twos[kLoads];
#pragma unroll
    for (int b = 0; b < kLoads; ++b) twos[b] = sample.two(2 * pair(b));
    if (round == 0) {
      clear_bins(shared);
      float low = INFINITY;
      float high = -INFINITY;
#pragma unroll
      for (int b = 0; b < kLoads; ++b) {
        low = fminf(low, fminf(twos[b].x, twos[b].y));
        high = fmaxf(high, fmaxf(twos[b].x, twos[b].y));
      }
      bins = EvenBins(range_of(shared, {sort_key(low), sort_key(high)}));
      if (!bins.work()) return bound_of_sample(shared, sample, guess);
    }
#pragma unroll
    for (int b = 0; b < kLoads; ++b) {
      if (b * kThreads * rounds >= pairs) break;
      atomicAdd(&shared.bins[EvenBins::bin(bins.near_position(twos[b].x))], 1u);
      atomicAdd(&shared.bins[EvenBins::bin(bins.near_position(twos[b].y))], 1u);
    }
  }
  __syncthreads();
  const WantedBin found = find_bin(shared, guess.wanted);
  if (found.bin > 0 && guess.has_room(found.above + found.of_bin))
    return {bins.lowest(found.bin), kAllEqual};
  return bound_of_sample(shared, sample, guess);
}

/// Which of each lane's four scores pass, a bit a lane.
template <class Passes>
__device__ uint4 passing(float4 four, Passes passes) {
  return {__ballot_sync(kAllLanes, passes(four.x)), __ballot_sync(kAllLanes, passes(four.y)),
          __ballot_sync(kAllLanes, passes(four.z)), __ballot_sync(kAllLanes, passes(four.w))};
}
__device__ inline std::uint32_t count_of(uint4 marks) {
  return __popc(marks.x) + __popc(marks.y) + __popc(marks.z) + __popc(marks.w);
}

/// Marks the keys that reach the guess in `blocks` blocks from `first` on; kEqual: also those
/// above.
template <bool kEqual, int kEach>
__device__ void mark(RowStorage<kEach>& shared, const Row& row, float least, std::uint32_t first,
                     std::uint32_t blocks) {
  constexpr int kLoads = 8;
  const std::uint32_t lane = threadIdx.x % 32;
  const std::uint32_t warp = threadIdx.x / 32;
  const auto* const fours = reinterpret_cast<const float4*>(row.scores + first * kBlockKeys) + lane;
  const auto set = [&](std::uint32_t block, float4 four) {
    const uint4 marks = passing(four, [&](float score) { return score >= least; });
    if (lane == 0) shared.marks[block] = marks;
    if constexpr (kEqual) {
      const uint4 above = passing(four, [&](float score) { return score > least; });
      if (lane == 0) shared.above[block] = above;
    }
  };
  // Unconditional loads are in flight together.
  const auto mark_all = [&](auto number) {
    float4 loaded[kLoads];
#pragma unroll
    for (int b = 0; b < kLoads; ++b) loaded[b] = __ldcg(fours + number(b) * 32);
#pragma unroll
    for (int b = 0; b < kLoads; ++b) set(number(b), loaded[b]);
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
    const float4 four = place < row.count() ? row.four_scores(place) : float4{};
    set(block, row.in_window(four, place));
  }
}

/// Makes the keys above the guess, and the first `equal` of those equal to it, candidates. Returns
/// their number, or more than kMost if there are more than that.
template <bool kEqual, int kEach>
__device__ std::uint32_t collect(RowStorage<kEach>& shared, const Row& row, Bound guess) {
  std::uint32_t count = 0;
  std::uint32_t equal_left = guess.equal;
  const std::uint32_t all_blocks = (row.count() + kBlockKeys - 1) / kBlockKeys;
  for (std::uint32_t first = 0; first < all_blocks; first += kMarkedBlocks) {
    const std::uint32_t blocks = min(all_blocks - first, std::uint32_t{kMarkedBlocks});
    mark<kEqual>(shared, row, guess.least, first, blocks);
    __syncthreads();
    // Each thread takes one block.
    static_assert(kMarkedBlocks <= kThreads);
    const bool has_block = threadIdx.x < blocks;
    const uint4 marks = has_block ? shared.marks[threadIdx.x] : uint4{};
    uint4 above = marks;
    std::uint32_t own = count_of(marks);
    std::uint32_t own_equal = 0;  // that become candidates
    if constexpr (kEqual) {
      above = has_block ? shared.above[threadIdx.x] : uint4{};
      const std::uint32_t equal = own - count_of(above);
      const Prefix prefix = prefix_sum(shared.bound, equal);
      own_equal = min(equal, equal_left - min(prefix.before, equal_left));
      equal_left -= min(prefix.all, equal_left);
      own = count_of(above) + own_equal;
    }
    const Prefix prefix = prefix_sum(shared.bound, own);
    if (count + prefix.all > shared.kMost) return shared.kMost + 1;
    std::uint32_t to = count + prefix.before;
    const uint4 some = own_equal > 0 ? marks : above;
    for (unsigned lanes = some.x | some.y | some.z | some.w; lanes != 0; lanes &= lanes - 1) {
      const int lane = __ffs(static_cast<int>(lanes)) - 1;
      const std::uint32_t place = (first + threadIdx.x) * kBlockKeys + lane * 4;
      const auto add = [&](unsigned marked, unsigned is_above, int j) {
        if ((marked >> lane & 1) == 0) return;
        if (kEqual && (is_above >> lane & 1) == 0) {
          if (own_equal == 0) return;
          --own_equal;
        }
        shared.places[to++] = place + j;
      };
      add(marks.x, above.x, 0);
      add(marks.y, above.y, 1);
      add(marks.z, above.z, 2);
      add(marks.w, above.w, 3);
    }
    __syncthreads();
    for (std::uint32_t i = count + threadIdx.x; i < count + prefix.all; i += kThreads)
      shared.scores[i] = __ldcg(row.scores + shared.places[i]);
    count += prefix.all;
  }
  __syncthreads();
  return count;
}

/// The same where equal scores count. It is a function of its own, because few rows need it and it
/// would take registers from the others.
template <int kEach>
__device__ __noinline__ std::uint32_t collect_some_equal(RowStorage<kEach>& shared, Row row,
                                                         Bound guess) {
  return collect<true>(shared, row, guess);
}

/// Selects from `count` candidates, up to kEach a thread, in the order of their keys: `score(n)`
/// and `key(n)` are those of this thread's n-th. Returns how many were selected, or -1 if the
/// scores are too close to each other or too far apart for this method, or if equal scores stand at
/// the bound.
template <int kEach, int kMostEach, class Score, class Key>
__device__ int select_from(RowStorage<kMostEach>& shared, const Slots& slots, std::uint32_t count,
                           Score score, Key key) {
  float scores[kEach];
#pragma unroll
  for (int n = 0; n < kEach; ++n)
    scores[n] = n * kThreads + threadIdx.x < count ? score(n) : no_score();
  float least = -FLT_MAX;
  if (count > slots.topk) {
    clear_bins(shared.bound);
    const Range range = range_of_scores(shared.bound, scores);
    const EvenBins bins(range);
    if (range.low >= range.high || !bins.work()) return -1;
#pragma unroll
    for (int n = 0; n < kEach; ++n)
      atomicAdd(&shared.bound.bins[EvenBins::bin(bins.position(scores[n]))], 1u);
    __syncthreads();
    const WantedBin found = find_bin(shared.bound, slots.topk);
    if (found.all > slots.topk) {
      if (found.of_bin > kFew) return -1;
      std::uint32_t in_bin = 0;  // bit n: this thread's n-th is in the bound's bin
#pragma unroll
      for (int n = 0; n < kEach; ++n) {
        if (bins.position(scores[n]) == EvenBins::position_of(found.bin)) in_bin |= 1u << n;
      }
      for (; in_bin != 0; in_bin &= in_bin - 1)
        add_few(shared.bound, score(__ffs(static_cast<int>(in_bin)) - 1));
      const std::uint32_t wanted = slots.topk - found.above;
      const Bound bound = quantile_of_few(shared.bound, found.of_bin, wanted).bound_of(wanted);
      if (bound.equal != kAllEqual) return -1;
      least = bound.least;
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

/// Selects from any values, in the order of their numbers; `key(i)` is the i-th one's. Returns how
/// many were selected.
template <class Values, class Key>
__device__ __noinline__ int select_any(SharedStorage& shared, Values values, Slots slots, Key key) {
  const auto wanted = static_cast<std::uint32_t>(slots.topk);
  const Bound bound = find_quantile(shared, values, wanted).bound_of(wanted);
  return static_cast<int>(each_kept(
      shared, values, bound,
      [&](std::uint32_t slot, std::uint32_t i, float score) { slots.set(slot, key(i), score); }));
}

/// Selects from a row; returns how many.
template <int kEach>
__device__ int select(RowStorage<kEach>& shared, const Row& row, const Slots& slots) {
  const auto select_quickly = [&](std::uint32_t count, auto score, auto key) {
    constexpr int kFewer = kEach * 3 / 4;  // enough for most rows
    return count <= kFewer * kThreads  ? select_from<kFewer>(shared, slots, count, score, key)
           : count <= kEach * kThreads ? select_from<kEach>(shared, slots, count, score, key)
                                       : -1;
  };
  // Selects from shared.scores, once they are padded.
  const auto select_from_held = [&](std::uint32_t count, auto key) {
    const std::uint32_t padded = (count + 3) / 4 * 4;
    if (threadIdx.x < padded - count) shared.scores[count + threadIdx.x] = no_score();
    __syncthreads();
    return select_any(shared.bound, HeldValues{shared.scores, padded}, slots, key);
  };
  if (row.count() <= kEach * kThreads) {
    // The scores may begin with up to three keys before the window.
    const auto count = static_cast<std::uint32_t>(row.end - row.begin);
    const float* const scores = row.scores + (row.begin - row.first);
    const int own_key = row.begin + static_cast<int>(threadIdx.x);
    const int written = select_quickly(
        count, [&](int n) { return __ldcg(scores + n * kThreads + threadIdx.x); },
        [&](int n) { return own_key + n * kThreads; });
    if (written >= 0) return written;
    for (std::uint32_t i = threadIdx.x; i < count; i += kThreads)
      shared.scores[i] = __ldcg(scores + i);
    return select_from_held(
        count, [first = row.begin](std::uint32_t i) { return first + static_cast<int>(i); });
  }
  if (slots.topk <= kMostGuessed<kEach>) {
    const SampleValues sample{row.sample, row.sample_count};
    Guess guess(row, slots.topk, shared.kMost);
    const Bound likely = likely_bound(shared.bound, sample, guess);
    std::uint32_t count = likely.equal == kAllEqual ? collect<false>(shared, row, likely)
                                                    : collect_some_equal(shared, row, likely);
    if (count < slots.topk || count > shared.kMost) {
      // Chance. The guess errs to the other side now.
      guess.wanted = count < slots.topk ? guess.wanted * 6 / 5 : guess.wanted * 5 / 6;
      count = collect_some_equal(shared, row, bound_of_sample(shared.bound, sample, guess));
    }
    if (count >= slots.topk && count <= shared.kMost) {
      const auto key = [first = row.first, places = shared.places](std::uint32_t i) {
        return first + static_cast<int>(places[i]);
      };
      const auto number = [](int n) {
        return static_cast<std::uint32_t>(n * kThreads + threadIdx.x);
      };
      const int written = select_quickly(
          count, [&](int n) { return shared.scores[number(n)]; },
          [&](int n) { return key(number(n)); });
      return written >= 0 ? written : select_from_held(count, key);
    }
  }
  return select_any(shared.bound, RowValues{row, row.count()}, slots,
                    [first = row.first](std::uint32_t i) { return first + static_cast<int>(i); });
}

}  // namespace winnow::cuda::index_topk
