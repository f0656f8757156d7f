// SPDX-License-Identifier: Apache-2.0
// Finding the bound that a given number of candidates pass, by a thread block: a histogram, then a
// comparison of the few candidates in the bound's bin. Also the shared memory of such a block.
#pragma once

#include <cstdint>

#include "cuda/index_topk/plan.cuh"

namespace winnow::cuda::index_topk {

inline constexpr int kThreads = 256;
inline constexpr int kWarps = kThreads / 32;
inline constexpr int kBinBits = 10;
inline constexpr int kBins = 1 << kBinBits;
inline constexpr std::uint32_t kFew = kThreads;  // so few that each is compared with all
inline constexpr unsigned kAllLanes = 0xffffffffu;

/// The sort key of a score: an unsigned integer that is larger for scores that are selected first,
/// and equal for +0 and -0. It is 0 for NaN and -inf, which are never selected.
__device__ inline std::uint32_t sort_key(float score) {
  const auto bits = __float_as_int(score + 0.0f);
  const auto key = static_cast<std::uint32_t>(bits ^ (bits >> 31 | INT32_MIN));
  constexpr std::uint32_t kLeastSortKey = 0x0080'0000u;  // of the lowest finite number
  constexpr std::uint32_t kMostSortKey = 0xff80'0000u;   // of infinity
  return key - kLeastSortKey <= kMostSortKey - kLeastSortKey ? key : 0;
}
__device__ inline float score_of(std::uint32_t sort_key) {
  return __uint_as_float(sort_key & 0x8000'0000u ? sort_key & 0x7fff'ffffu : ~sort_key);
}

/// Candidates above `sort_key` are kept, and of those equal to it the ones up to number `last`.
struct Bound {
  std::uint32_t sort_key;
  std::uint32_t last;
  __device__ bool keeps(std::uint32_t candidate, std::uint32_t number) const {
    return candidate > sort_key || (candidate == sort_key && number <= last);
  }
};

inline constexpr std::uint32_t kLastNumber = 0xffffffffu;
inline constexpr Bound kNoBound{1, kLastNumber};

struct Range {
  std::uint32_t low, high;
  __device__ void take(std::uint32_t value) {
    low = min(low, value);
    high = max(high, value);
  }
};
inline constexpr Range kNothing{0xffffffffu, 0};
inline constexpr Range kEverything{1, 0xffffffffu};

struct SharedStorage {
  std::uint32_t bins[kBins + 1];  // the last one counts NaN
  std::uint32_t warp_sums[kWarps];
  Range warp_ranges[kWarps];
  std::uint32_t bin, above, of_bin;
  std::uint32_t few;
  Bound bound;
};

/// The sum over the threads before this one, and over all threads.
struct Prefix {
  std::uint32_t before;
  std::uint32_t all;
};
__device__ inline Prefix warp_prefix_sum(std::uint32_t value) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  std::uint32_t sum = value;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const std::uint32_t other = __shfl_up_sync(kAllLanes, sum, step);
    if (lane >= step) sum += other;
  }
  return {sum - value, __shfl_sync(kAllLanes, sum, 31)};
}
__device__ inline Prefix prefix_sum(SharedStorage& shared, std::uint32_t value) {
  const Prefix lanes = warp_prefix_sum(value);
  if (threadIdx.x % 32 == 0) shared.warp_sums[threadIdx.x / 32] = lanes.all;
  __syncthreads();
  Prefix prefix{lanes.before, 0};
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) {
    if (warp == threadIdx.x / 32) prefix.before += prefix.all;
    prefix.all += shared.warp_sums[warp];
  }
  __syncthreads();
  return prefix;
}

/// The lowest and the highest value over all threads.
__device__ inline Range range_of(SharedStorage& shared, Range own) {
  __syncthreads();  // all threads have read the previous ranges
  own.low = __reduce_min_sync(kAllLanes, own.low);
  own.high = __reduce_max_sync(kAllLanes, own.high);
  if (threadIdx.x % 32 == 0) shared.warp_ranges[threadIdx.x / 32] = own;
  __syncthreads();
  Range range = kNothing;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) {
    range.low = min(range.low, shared.warp_ranges[warp].low);
    range.high = max(range.high, shared.warp_ranges[warp].high);
  }
  return range;
}

/// Maps scores to bins of equal width, in their order, which spreads the scores of most rows well.
class EvenBins {
 public:
  __device__ EvenBins() = default;
  __device__ explicit EvenBins(Range range) : low_(score_of(range.low)) {
    const float width = score_of(range.high) - low_;
    factor_ = (kBins - 1) / width;
    // It does not work with infinite scores (-inf makes the lowest NaN), nor where the quotient
    // overflows.
    if (!(factor_ > 0 && width <= 3e38f && factor_ <= 3e38f)) factor_ = 0;
  }
  __device__ bool work() const { return factor_ > 0; }
  /// The position of a score in the range, as a float whose last bits are the number of the bin:
  /// beside kBase no fraction is left, so no conversion is needed. NaN is in bin kBins.
  __device__ float position(float score) const {
    return fminf(fmaf(score - low_, factor_, kBase), position_of(kBins));
  }
  /// The position of any score; those outside of the range go to the first and to the last bin, NaN
  /// to the first.
  __device__ float near_position(float score) const {
    return fminf(fmaxf(fmaf(score - low_, factor_, kBase), kBase), position_of(kBins - 1));
  }
  __device__ static std::uint32_t bin(float position) {
    return __float_as_uint(position) - __float_as_uint(kBase);
  }
  __device__ static float position_of(std::uint32_t bin) { return kBase + static_cast<float>(bin); }
  /// The lowest score of a bin, approximately.
  __device__ float lowest(std::uint32_t bin) const {
    return low_ + (static_cast<float>(bin) - 0.5f) / factor_;
  }

 private:
  static constexpr float kBase = 1 << 23;
  float low_ = 0;
  float factor_ = 0;
};

/// Maps values to bins, in their order: at first evenly over the scores, then evenly over the
/// values, which settles kBinBits more of their bits each time.
class Binning {
 public:
  __device__ Binning() = default;
  __device__ Binning(Range range, bool by_score) : low_(range.low) {
    shift_ = max(32 - __clz(static_cast<int>(range.high - range.low)) - kBinBits, 0);
    if (by_score) even_ = EvenBins(range);
  }
  __device__ std::uint32_t bin(std::uint32_t value) const {
    return even_.work() ? EvenBins::bin(even_.position(score_of(value))) : (value - low_) >> shift_;
  }

 private:
  std::uint32_t low_ = 0;
  int shift_ = 0;
  EvenBins even_;
};

__device__ inline void clear_bins(SharedStorage& shared) {
  for (int i = threadIdx.x; i < kBins; i += kThreads) shared.bins[i] = 0;
  if (threadIdx.x == 0) shared.few = 0;
}

/// The bin of the value that `wanted` values reach, and how many values are in it and above it. If
/// there are fewer values, only `all`, their number, is set.
struct WantedBin {
  std::uint32_t bin, of_bin, above, all;
};
__device__ inline WantedBin find_bin(SharedStorage& shared, std::uint32_t wanted) {
  // Threads take bins from the highest down.
  constexpr int kOwn = kBins / kThreads;
  const int highest = kBins - 1 - static_cast<int>(threadIdx.x) * kOwn;
  std::uint32_t own[kOwn];
  std::uint32_t sum = 0;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    own[i] = shared.bins[highest - i];
    sum += own[i];
  }
  const Prefix prefix = prefix_sum(shared, sum);
  std::uint32_t passed = prefix.before;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    if (passed < wanted && passed + own[i] >= wanted) {
      shared.bin = highest - i;
      shared.above = passed;
      shared.of_bin = own[i];
    }
    passed += own[i];
  }
  __syncthreads();
  return {shared.bin, shared.of_bin, shared.above, prefix.all};
}

// Candidates that are few enough to compare each with all; they are stored where the bins were.
__device__ inline void add_few(SharedStorage& shared, std::uint32_t value, std::uint32_t number) {
  const std::uint32_t to = atomicAdd(&shared.few, 1u);
  shared.bins[to] = value;
  shared.bins[kFew + to] = number;
}
/// The bound that `wanted` of `count` pass, once all threads have added theirs. Its `last` is
/// kLastNumber if it splits no equal values.
__device__ inline Bound bound_of_few(SharedStorage& shared, std::uint32_t count,
                                     std::uint32_t wanted) {
  __syncthreads();
  if (threadIdx.x < count) {
    Bound own{shared.bins[threadIdx.x], shared.bins[kFew + threadIdx.x]};
    std::uint32_t passing = 0;  // itself included
    std::uint32_t equal_or_above = 0;
    for (std::uint32_t i = 0; i < count; ++i) {
      passing += own.keeps(shared.bins[i], shared.bins[kFew + i]) ? 1 : 0;
      equal_or_above += shared.bins[i] >= own.sort_key ? 1 : 0;
    }
    if (passing == wanted) {
      if (passing == equal_or_above) own.last = kLastNumber;
      shared.bound = own;
    }
  }
  __syncthreads();
  return shared.bound;
}

/// The bound that exactly `wanted` candidates pass, or all if there are no more. `each(f)` calls
/// f(sort_key, number) for the candidates of a thread; a sort key of 0 is none. Among equal ones
/// those with the smallest numbers pass.
template <class Each>
__device__ Bound find_bound(SharedStorage& shared, std::uint32_t wanted, Each each) {
  // First by sort keys. Where all that are left are equal, by numbers: the smallest numbers have
  // the largest complements.
  bool by_number = false;
  std::uint32_t equal = 0;
  const auto bound_at = [&](std::uint32_t value, std::uint32_t last) {
    return by_number ? Bound{equal, ~value} : Bound{value, last};
  };
  // What is left is one bin of a range.
  Range range = kEverything;
  Binning binning;
  std::uint32_t bin = 0;
  bool is_first = true;
  const auto each_left = [&](auto use) {
    each([&](std::uint32_t key, std::uint32_t number) {
      const std::uint32_t value = !by_number ? key : key == equal ? ~number : 0;
      const bool is_left =
          value >= range.low && value <= range.high && (is_first || binning.bin(value) == bin);
      if (is_left) use(value, number);
    });
  };
  while (true) {
    Range own = kNothing;
    each_left([&](std::uint32_t value, std::uint32_t) { own.take(value); });
    const Range left = range_of(shared, own);
    if (left.low > left.high) return kNoBound;
    if (left.low == left.high) {
      if (by_number) return bound_at(left.low, 0);
      by_number = true;
      equal = left.low;
      range = kEverything;
      is_first = true;
      continue;
    }
    const Binning finer(left, is_first && !by_number);
    clear_bins(shared);
    __syncthreads();
    each_left(
        [&](std::uint32_t value, std::uint32_t) { atomicAdd(&shared.bins[finer.bin(value)], 1u); });
    __syncthreads();
    const WantedBin found = find_bin(shared, wanted);
    if (found.all <= wanted) return bound_at(left.low, kLastNumber);
    range = left;
    binning = finer;
    bin = found.bin;
    is_first = false;
    wanted -= found.above;
    if (found.of_bin > kFew) continue;
    each_left([&](std::uint32_t value, std::uint32_t number) { add_few(shared, value, number); });
    const Bound bound = bound_of_few(shared, found.of_bin, wanted);
    return bound_at(bound.sort_key, bound.last);
  }
}

}  // namespace winnow::cuda::index_topk
