// SPDX-License-Identifier: Apache-2.0
// Finding the bound that a given number of values pass, by a thread block: a histogram, then a
// comparison of the few values in the bound's bin, or a histogram of that bin.
#pragma once

#include <cfloat>
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

/// Values above `least` are kept, and of those equal to it the first `equal` in their order.
struct Bound {
  float least;
  std::uint32_t equal;
};
inline constexpr std::uint32_t kAllEqual = 0xffffffffu;

/// A value of a set, and how many are above it and equal to it.
struct Quantile {
  float value;
  std::uint32_t above, equal;
  /// The bound that `wanted` values pass, of which this is the last.
  __device__ Bound bound_of(std::uint32_t wanted) const {
    return {value, wanted >= above + equal ? kAllEqual : wanted - above};
  }
};

/// The values from `low` to `high`, given as sort keys.
struct Range {
  std::uint32_t low, high;
  __device__ bool is_empty() const { return low > high; }
};

/// Parts are aligned, so that a load of four words of one does not read another, which racecheck
/// takes for a race.
struct SharedStorage {
  alignas(16) std::uint32_t bins[kBins + 1];  // the last one counts NaN
  alignas(16) std::uint32_t warp_sums[kWarps];
  alignas(16) Range warp_ranges[kWarps];
  alignas(16) std::uint32_t bin, above, of_bin;
  std::uint32_t few;
  Quantile quantile;
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
/// The sum over the warps before this one, and over all warps, of a value that lanes share.
__device__ inline Prefix sum_over_warps(SharedStorage& shared, std::uint32_t value) {
  if (threadIdx.x % 32 == 0) shared.warp_sums[threadIdx.x / 32] = value;
  __syncthreads();
  Prefix prefix{0, 0};
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) {
    if (warp == threadIdx.x / 32) prefix.before = prefix.all;
    prefix.all += shared.warp_sums[warp];
  }
  __syncthreads();
  return prefix;
}

__device__ inline Prefix prefix_sum(SharedStorage& shared, std::uint32_t value) {
  const Prefix lanes = warp_prefix_sum(value);
  const Prefix warps = sum_over_warps(shared, lanes.all);
  return {warps.before + lanes.before, warps.all};
}

/// The range over all threads.
__device__ inline Range range_of(SharedStorage& shared, Range own) {
  __syncthreads();  // all threads have read the previous ranges
  own.low = __reduce_min_sync(kAllLanes, own.low);
  own.high = __reduce_max_sync(kAllLanes, own.high);
  if (threadIdx.x % 32 == 0) shared.warp_ranges[threadIdx.x / 32] = own;
  __syncthreads();
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) {
    own.low = min(own.low, shared.warp_ranges[warp].low);
    own.high = max(own.high, shared.warp_ranges[warp].high);
  }
  return own;
}

/// Maps scores to bins of equal width, in their order, which spreads the scores of most rows well.
class EvenBins {
 public:
  EvenBins() = default;
  __device__ explicit EvenBins(Range range) : low_(score_of(range.low)) {
    const float width = score_of(range.high) - low_;
    factor_ = (kBins - 1) / width;
    // It does not work with infinite scores, nor where the quotient overflows.
    if (!(factor_ > 0 && width <= FLT_MAX && factor_ <= FLT_MAX)) factor_ = 0;
  }
  __device__ bool work() const { return factor_ > 0; }
  /// The position of a score of the range, as a float whose last bits are the number of the bin:
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

/// Maps the values of a range to bins, in their order: evenly over the scores, or evenly over the
/// sort keys, which settles kBinBits more of their bits.
class Binning {
 public:
  __device__ Binning(Range range, bool by_score)
      : low_key_(range.low), low_(score_of(range.low)), high_(score_of(range.high)) {
    shift_ = max(32 - __clz(static_cast<int>(range.high - range.low)) - kBinBits, 0);
    if (by_score) even_ = EvenBins(range);
  }
  __device__ bool contains(float value) const { return value >= low_ && value <= high_; }
  /// The bin of a value in the range.
  __device__ std::uint32_t bin(float value) const {
    return even_.work() ? EvenBins::bin(even_.position(value))
                        : (sort_key(value) - low_key_) >> shift_;
  }

 private:
  std::uint32_t low_key_;
  float low_, high_;
  int shift_;
  EvenBins even_;
};

__device__ inline void clear_bins(SharedStorage& shared) {
  for (std::uint32_t i = threadIdx.x; i < kBins; i += kThreads) shared.bins[i] = 0;
  if (threadIdx.x == 0) shared.few = 0;
}

/// The bin of the value that `wanted` values reach, and how many values are in it and above it. If
/// there are fewer values, only `all`, their number, is set.
struct WantedBin {
  std::uint32_t bin, of_bin, above, all;
};
__device__ inline WantedBin find_bin(SharedStorage& shared, std::uint32_t wanted) {
  // Threads take four bins each, from the highest down.
  constexpr int kOwn = kBins / kThreads;
  static_assert(kOwn == 4);
  const int highest = kBins - 1 - static_cast<int>(threadIdx.x) * kOwn;
  const uint4 bins = *reinterpret_cast<const uint4*>(&shared.bins[highest - 3]);
  const std::uint32_t own[kOwn] = {bins.w, bins.z, bins.y, bins.x};
  const Prefix prefix = prefix_sum(shared, own[0] + own[1] + own[2] + own[3]);
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

// Values that are few enough to compare each with all; they are stored where the bins were.
__device__ inline void add_few(SharedStorage& shared, float value) {
  shared.bins[atomicAdd(&shared.few, 1u)] = __float_as_uint(value);
}
/// The value that `wanted` of `count` reach, once all threads have added theirs.
__device__ inline Quantile quantile_of_few(SharedStorage& shared, std::uint32_t count,
                                           std::uint32_t wanted) {
  __syncthreads();
  if (threadIdx.x < count) {
    const float own = __uint_as_float(shared.bins[threadIdx.x]);
    std::uint32_t above = 0;
    std::uint32_t equal = 0;
    std::uint32_t equal_before = 0;
    for (std::uint32_t i = 0; i < count; ++i) {
      const float other = __uint_as_float(shared.bins[i]);
      above += other > own ? 1 : 0;
      equal += other == own ? 1 : 0;
      equal_before += other == own && i < threadIdx.x ? 1 : 0;
    }
    // The first of the equal ones tells the others.
    if (above < wanted && wanted <= above + equal && equal_before == 0)
      shared.quantile = {own, above, equal};
  }
  __syncthreads();
  return shared.quantile;
}

/// Calls use(value) for this thread's part of all values. `values.four(i)` are four neighbours;
/// their number, `values.count`, is padded with NaN to a multiple of 4.
template <class Values, class Use>
__device__ void each(const Values& values, Use use) {
  constexpr int kLoads = 4;
  const std::uint32_t step = 4 * kThreads;
  for (std::uint32_t base = 4 * threadIdx.x; base < values.count; base += kLoads * step) {
    float4 fours[kLoads];
#pragma unroll
    for (int b = 0; b < kLoads; ++b) {
      const std::uint32_t i = base + b * step;
      fours[b] = values.four(i < values.count ? i : base);
    }
#pragma unroll
    for (int b = 0; b < kLoads; ++b) {
      if (base + b * step >= values.count) break;
      use(fours[b].x);
      use(fours[b].y);
      use(fours[b].z);
      use(fours[b].w);
    }
  }
}

/// The range of the values for which is_counted(value); values that cannot be selected are not.
template <class Values, class IsCounted>
__device__ Range range_of_values(SharedStorage& shared, const Values& values,
                                 IsCounted is_counted) {
  float low = INFINITY;
  float high = -INFINITY;
  each(values, [&](float value) {
    if (value > -INFINITY && is_counted(value)) {
      low = fminf(low, value);
      high = fmaxf(high, value);
    }
  });
  return range_of(shared, {sort_key(low), sort_key(high)});
}

/// The value that `wanted` values reach; if there are not that many that can be selected, the
/// lowest number, which all of them are above.
template <class Values>
__device__ Quantile find_quantile(SharedStorage& shared, const Values& values,
                                  std::uint32_t wanted) {
  Range range = range_of_values(shared, values, [](float) { return true; });
  std::uint32_t above = 0;
  for (bool is_first = true; !range.is_empty(); is_first = false) {
    const Binning binning(range, /*by_score=*/is_first);
    clear_bins(shared);
    __syncthreads();
    each(values, [&](float value) {
      if (binning.contains(value)) atomicAdd(&shared.bins[binning.bin(value)], 1u);
    });
    __syncthreads();
    const WantedBin found = find_bin(shared, wanted);
    if (is_first && found.all < wanted) return {-FLT_MAX, found.all, 0};
    above += found.above;
    wanted -= found.above;
    const auto is_in_bin = [&](float value) {
      return binning.contains(value) && binning.bin(value) == found.bin;
    };
    if (found.of_bin <= kFew) {
      each(values, [&](float value) {
        if (is_in_bin(value)) add_few(shared, value);
      });
      const Quantile of_bin = quantile_of_few(shared, found.of_bin, wanted);
      return {of_bin.value, above + of_bin.above, of_bin.equal};
    }
    range = range_of_values(shared, values, is_in_bin);
    if (range.low == range.high) return {score_of(range.low), above, found.of_bin};
  }
  return {-FLT_MAX, 0, 0};
}

/// Calls use(slot, i, value) for each value that the bound keeps, i being its number, in whose
/// order slots are given. Returns how many.
template <class Values, class Use>
__device__ std::uint32_t each_kept(SharedStorage& shared, const Values& values, Bound bound,
                                   Use use) {
  // Each warp takes a contiguous part. It first counts, so that later warps know their slots.
  constexpr std::uint32_t kStep = 32 * 4;
  const std::uint32_t lane = threadIdx.x % 32;
  const std::uint32_t steps = (values.count + kStep * kWarps - 1) / (kStep * kWarps);
  const std::uint32_t first = threadIdx.x / 32 * steps * kStep;
  const std::uint32_t end = min(first + steps * kStep, values.count);
  std::uint32_t above = 0;
  std::uint32_t equal = 0;
  for (std::uint32_t i = first + lane * 4; i < end; i += kStep) {
    const float4 four = values.four(i);
    for (const float value : {four.x, four.y, four.z, four.w}) {
      above += value > bound.least ? 1 : 0;
      equal += value == bound.least ? 1 : 0;
    }
  }
  const Prefix all_above = sum_over_warps(shared, __reduce_add_sync(kAllLanes, above));
  const Prefix all_equal = sum_over_warps(shared, __reduce_add_sync(kAllLanes, equal));
  std::uint32_t slot = all_above.before + min(all_equal.before, bound.equal);
  std::uint32_t equal_before = all_equal.before;
  const unsigned earlier = (1u << lane) - 1;
  for (std::uint32_t base = first; base < end; base += kStep) {
    const std::uint32_t i = base + lane * 4;
    const float4 four = i < end ? values.four(i) : float4{NAN, NAN, NAN, NAN};
    const float value[4] = {four.x, four.y, four.z, four.w};
    bool is_kept[4];
    unsigned kept[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      is_kept[j] = value[j] >= bound.least;
      kept[j] = __ballot_sync(kAllLanes, is_kept[j]);
    }
    if ((kept[0] | kept[1] | kept[2] | kept[3]) == 0) continue;
    if (bound.equal != kAllEqual) {
      // Equal ones are kept as long as there are slots for them.
      unsigned equals[4];
      std::uint32_t rank = equal_before;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        equals[j] = __ballot_sync(kAllLanes, value[j] == bound.least);
        rank += __popc(equals[j] & earlier);
        equal_before += __popc(equals[j]);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (value[j] == bound.least) is_kept[j] = rank++ < bound.equal;
        kept[j] = __ballot_sync(kAllLanes, is_kept[j]);
      }
    }
    std::uint32_t own = slot;
#pragma unroll
    for (int j = 0; j < 4; ++j) own += __popc(kept[j] & earlier);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (is_kept[j]) use(own++, i + j, value[j]);
      slot += __popc(kept[j]);
    }
  }
  return all_above.all + min(all_equal.all, bound.equal);
}

}  // namespace winnow::cuda::index_topk
