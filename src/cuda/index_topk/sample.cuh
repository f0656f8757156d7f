// SPDX-License-Identifier: Apache-2.0
// What a row's sample (plan.cuh) says of its bound: a score that is likely below it, and not far.
// The sample is spread over the row, so that neighbours which are alike do not mislead.
#pragma once

#include <cstdint>

#include "cuda/index_topk/bound.cuh"
#include "cuda/index_topk/row.cuh"

namespace winnow::cuda::index_topk {

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
  /// Whether there is room for the keys that reach a score, if so many of the sample are above it
  /// and so many others close to it. Many that are close come together or not at all, so that
  /// chance would tell too much.
  __device__ bool has_room(std::uint32_t above, std::uint32_t close) const {
    constexpr std::uint32_t kMostClose = 32;
    return close <= kMostClose &&
           static_cast<float>(above + close) * keys_each <= 0.85f * static_cast<float>(most);
  }
};

/// A score that, judged by the sample, more than topk keys of the row reach, but not many more, on
/// any scores. Candidates are the keys above it and the first `equal` of those that have it.
__device__ __noinline__ Bound bound_of_sample(SharedStorage& shared, SampleValues sample,
                                              Guess guess) {
  const Quantile quantile = find_quantile(shared, sample, guess.wanted);
  if (guess.has_room(quantile.above, quantile.equal)) return {quantile.value, kAllEqual};
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
  if (found.bin > 0 && guess.has_room(found.above, found.of_bin))
    return {bins.lowest(found.bin), kAllEqual};
  return bound_of_sample(shared, sample, guess);
}

}  // namespace winnow::cuda::index_topk
