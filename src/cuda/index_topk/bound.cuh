// SPDX-License-Identifier: Apache-2.0
// The bound that a given number of candidates pass, found by a thread block: a histogram, then a
// comparison of the few candidates in the bin of the bound. Also what such a block shares.
#pragma once

#include <cstdint>

#include "cuda/index_topk/plan.cuh"

namespace winnow::cuda::index_topk {

inline constexpr int kThreads = 256;
inline constexpr int kWarps = kThreads / 32;
inline constexpr int kBinBits = 10;
inline constexpr int kBins = 1 << kBinBits;
inline constexpr std::uint32_t kFew = kThreads;  // that are compared each with all
inline constexpr int kMapKeys = 1 << 16;         // keys whose bits are in shared memory at a time
inline constexpr int kMapWords = kMapKeys / 32;
inline constexpr unsigned kAllLanes = 0xffffffffu;

/// Candidates above `image` are kept, and of those equal to it the ones up to key `last`.
struct Bound {
  std::uint32_t image;
  std::uint32_t last;
  __device__ bool keeps(std::uint32_t candidate, std::uint32_t key) const {
    return candidate > image || (candidate == image && key <= last);
  }
};

inline constexpr Bound kNoBound{1, 0xffffffffu};

struct Range {
  std::uint32_t low, high;
};

struct SharedStorage {
  std::uint32_t map[kMapWords];  // a bit for each key, when all scores have been seen
  std::uint32_t bins[kBins];
  std::uint32_t warp_sums[kWarps];
  std::uint32_t count;  // of candidates
  Range range;
  std::uint32_t bin, above, of_bin;
  std::uint32_t few;
  Bound bound;
};

/// The sum over the threads before this one, and of all.
struct Prefix {
  std::uint32_t before;
  std::uint32_t all;
};
__device__ inline Prefix prefix_sum(SharedStorage& shared, std::uint32_t value) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  std::uint32_t sum = value;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const std::uint32_t other = __shfl_up_sync(kAllLanes, sum, step);
    if (lane >= step) sum += other;
  }
  if (lane == 31) shared.warp_sums[warp] = sum;
  __syncthreads();
  std::uint32_t of_warp = lane < kWarps ? shared.warp_sums[lane] : 0;
#pragma unroll
  for (int step = 1; step < kWarps; step *= 2) {
    const std::uint32_t other = __shfl_up_sync(kAllLanes, of_warp, step);
    if (lane >= step) of_warp += other;
  }
  const std::uint32_t all = __shfl_sync(kAllLanes, of_warp, kWarps - 1);
  const std::uint32_t before = warp == 0 ? 0 : __shfl_sync(kAllLanes, of_warp, warp - 1);
  __syncthreads();
  return {before + sum - value, all};
}

/// Images to bins, in their order. Evenly over the scores at first, which spreads what most rows
/// hold; evenly over the images where that fails: each time a third of their bits are settled.
class Binning {
 public:
  __device__ Binning(std::uint32_t low, std::uint32_t high, bool by_score) {
    low_ = low;
    shift_ = max(32 - __clz(static_cast<int>(high - low)) - kBinBits, 0);
    const float width = score_of(high) - score_of(low);
    factor_ = by_score ? (kBins - 1) / width : 0;
    // Not with infinite scores, nor where the quotient overflows.
    is_even_ = factor_ > 0 && width <= 3e38f && factor_ <= 3e38f;
  }
  __device__ std::uint32_t bin(std::uint32_t image) const {
    if (!is_even_) return (image - low_) >> shift_;
    const auto bin = static_cast<std::uint32_t>((score_of(image) - score_of(low_)) * factor_);
    return min(bin, static_cast<std::uint32_t>(kBins - 1));
  }

 private:
  std::uint32_t low_;
  int shift_;
  float factor_;
  bool is_even_;
};

/// The lowest and the highest of the values. `each(f)` calls f(value, key) for the values of a
/// thread; 0 is none.
template <class Each>
__device__ Range range_of(SharedStorage& shared, Each each) {
  __syncthreads();  // the range before is used no more
  if (threadIdx.x == 0) shared.range = {0xffffffffu, 0};
  Range own{0xffffffffu, 0};
  each([&](std::uint32_t value, std::uint32_t) {
    if (value == 0) return;
    own.low = min(own.low, value);
    own.high = max(own.high, value);
  });
  own.low = __reduce_min_sync(kAllLanes, own.low);
  own.high = __reduce_max_sync(kAllLanes, own.high);
  __syncthreads();
  if (threadIdx.x % 32 == 0) {
    atomicMin(&shared.range.low, own.low);
    atomicMax(&shared.range.high, own.high);
  }
  __syncthreads();
  return shared.range;
}

/// The bound that exactly `wanted` candidates pass, or all if there are no more. `each(f)` calls
/// f(image, key) for the candidates of a thread; an image of 0 is none. kKind: what the images are.
enum class Kind { scores, distinct_numbers };
template <Kind kKind, class Each>
__device__ Bound find_bound(SharedStorage& shared, std::uint32_t wanted, Each each) {
  Range range = range_of(shared, each);
  for (bool is_first = true; range.low < range.high; is_first = false) {
    const Binning binning(range.low, range.high, is_first && kKind == Kind::scores);
    const auto is_in = [&](std::uint32_t v) { return v >= range.low && v <= range.high; };
    for (int i = threadIdx.x; i < kBins; i += kThreads) shared.bins[i] = 0;
    if (threadIdx.x == 0) shared.few = 0;
    __syncthreads();
    each([&](std::uint32_t v, std::uint32_t) {
      if (is_in(v)) atomicAdd(&shared.bins[binning.bin(v)], 1u);
    });
    __syncthreads();
    // From the highest bin down: the one in which the bound is.
    constexpr int kOwn = kBins / kThreads;
    std::uint32_t own[kOwn];
    std::uint32_t sum = 0;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      own[i] = shared.bins[kBins - 1 - (threadIdx.x * kOwn + i)];
      sum += own[i];
    }
    const Prefix prefix = prefix_sum(shared, sum);
    if (is_first && prefix.all <= wanted) return kNoBound;
    std::uint32_t passed = prefix.before;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      if (passed < wanted && passed + own[i] >= wanted) {
        shared.bin = kBins - 1 - (threadIdx.x * kOwn + i);
        shared.above = passed;
        shared.of_bin = own[i];
      }
      passed += own[i];
    }
    __syncthreads();
    const std::uint32_t bin = shared.bin;
    const std::uint32_t of_bin = shared.of_bin;
    wanted -= shared.above;
    const auto is_in_bin = [&](std::uint32_t v) { return is_in(v) && binning.bin(v) == bin; };
    if (of_bin <= kFew) {
      // Few enough to compare each with all. They take the place of the bins.
      each([&](std::uint32_t v, std::uint32_t key) {
        if (!is_in_bin(v)) return;
        const std::uint32_t to = atomicAdd(&shared.few, 1u);
        shared.bins[to] = v;
        shared.bins[kFew + to] = key;
      });
      __syncthreads();
      if (threadIdx.x < of_bin) {
        const Bound own_bound{shared.bins[threadIdx.x], shared.bins[kFew + threadIdx.x]};
        std::uint32_t passing = 0;  // itself included
        for (std::uint32_t i = 0; i < of_bin; ++i) {
          passing += own_bound.keeps(shared.bins[i], shared.bins[kFew + i]) ? 1 : 0;
        }
        if (passing == wanted) shared.bound = own_bound;
      }
      __syncthreads();
      return shared.bound;
    }
    range = range_of(shared, [&](auto use) {
      each([&](std::uint32_t v, std::uint32_t key) { use(is_in_bin(v) ? v : 0, key); });
    });
  }
  if (range.low > range.high) return kNoBound;  // there is none
  // All that is left is equal.
  if constexpr (kKind == Kind::scores) {
    // The smallest keys, which are the largest of their complements.
    const Bound last = find_bound<Kind::distinct_numbers>(shared, wanted, [&](auto use) {
      each([&](std::uint32_t v, std::uint32_t key) { use(v == range.low ? ~key : 0u, 0u); });
    });
    return {range.low, ~last.image};
  }
  return {range.low, 0};
}

}  // namespace winnow::cuda::index_topk
