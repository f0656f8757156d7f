// SPDX-License-Identifier: Apache-2.0
// The selection from a row by a thread block: a row that has more keys than slots, or whose slots
// are ordered by score. Its candidates are held in registers, in the order of their keys:
// clang-format off
//   short rows  All of their keys are candidates.
//   long rows   The row's sample gives a score that is likely below the bound; the keys that reach
//               it are the candidates. Where many keys have exactly that score, only the first of
//               these are.
// clang-format on
// Where scores are too close to each other for the first method, the bound of the candidates is
// found by histograms in shared memory. Histograms of the whole row find it with more slots than
// that method has room for, and where two guesses leave fewer candidates than slots or too many,
// which is a matter of chance and rare.
#pragma once

#include <cfloat>
#include <cstdint>

#include "cuda/index_topk/bound.cuh"
#include "cuda/index_topk/candidates.cuh"
#include "cuda/index_topk/row.cuh"
#include "cuda/index_topk/sample.cuh"

namespace winnow::cuda::index_topk {

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

/// Selects the values that the bound keeps, in the order of their numbers; `key(i)` is the i-th
/// one's. Returns how many were selected.
template <class Values, class Key>
__device__ __noinline__ int select_kept(SharedStorage& shared, Values values, Bound bound,
                                        Slots slots, Key key) {
  return static_cast<int>(each_kept(
      shared, values, bound,
      [&](std::uint32_t slot, std::uint32_t i, float score) { slots.set(slot, key(i), score); }));
}

/// The bound of any values.
template <class Values>
__device__ __noinline__ Bound bound_of(SharedStorage& shared, Values values, std::uint32_t wanted) {
  return find_quantile(shared, values, wanted).bound_of(wanted);
}

/// Selects from a row; returns how many.
template <int kEach>
__device__ int select(RowStorage<kEach>& shared, const Row& row, const Slots& slots) {
  const auto topk = static_cast<std::uint32_t>(slots.topk);
  const auto select_quickly = [&](std::uint32_t count, auto score, auto key) {
    constexpr int kFewer = kEach * 3 / 4;  // enough for most rows
    return count <= kFewer * kThreads ? select_from<kFewer>(shared, slots, count, score, key)
                                      : select_from<kEach>(shared, slots, count, score, key);
  };
  // The values of shared.scores, padded.
  const auto held = [&](std::uint32_t count) {
    const std::uint32_t padded = (count + 3) / 4 * 4;
    if (threadIdx.x < padded - count) shared.scores[count + threadIdx.x] = no_score();
    __syncthreads();
    return HeldValues{shared.scores, padded};
  };
  const auto select_any = [&](const auto& values, auto key) {
    return select_kept(shared.bound, values, bound_of(shared.bound, values, topk), slots, key);
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
    return select_any(held(count),
                      [first = row.begin](std::uint32_t i) { return first + static_cast<int>(i); });
  }
  if (slots.topk <= kMostGuessed<kEach>) {
    const SampleValues sample{row.sample, row.sample_count};
    Guess guess(row, slots.topk, shared.kMost);
    Candidates found = collect_likely(shared, row, sample, guess);
    if (found.count < topk || found.count > shared.kMost) {
      // Chance. The guess errs to the other side now.
      guess.wanted = found.count < topk ? guess.wanted * 6 / 5 : guess.wanted * 5 / 6;
      const Bound other = bound_of_sample(shared.bound, sample, guess);
      found = collect_some_equal(shared, RowReader(shared.pieces, row), other);
    }
    if (found.count >= topk && found.count <= shared.kMost) {
      const auto key = [first = row.first, places = shared.places](std::uint32_t i) {
        return first + static_cast<int>(places[i]);
      };
      if (found.guess.equal != kAllEqual) {
        // Many scores are equal, for which the quick method is no good. The guess is the bound
        // itself where no more than topk are above it.
        const HeldValues values = held(found.count);
        return found.above <= topk
                   ? select_kept(shared.bound, values, Bound{found.guess.least, topk - found.above},
                                 slots, key)
                   : select_any(values, key);
      }
      const auto number = [](int n) {
        return static_cast<std::uint32_t>(n * kThreads + threadIdx.x);
      };
      const int written = select_quickly(
          found.count, [&](int n) { return shared.scores[number(n)]; },
          [&](int n) { return key(number(n)); });
      return written >= 0 ? written : select_any(held(found.count), key);
    }
  }
  return select_any(RowValues{row, row.count()},
                    [first = row.first](std::uint32_t i) { return first + static_cast<int>(i); });
}

}  // namespace winnow::cuda::index_topk
