// SPDX-License-Identifier: Apache-2.0
// Exact top-k of a stream of scores, by a running threshold and a buffer of candidates that is
// pruned to the best topk whenever it is full. Included once per SIMD target.

#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>
#include <span>

#include <hwy/highway.h>

#include "core/threads.h"
#include "cpu/selection_plan.h"

#if defined(WINNOW_CPU_SELECT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef WINNOW_CPU_SELECT_INL_H_
#undef WINNOW_CPU_SELECT_INL_H_
#else
#define WINNOW_CPU_SELECT_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace winnow::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

/// Maps a float to an integer of the same order; -0 comes right before +0.
constexpr std::int32_t sort_key(float x) {
  const auto bits = std::bit_cast<std::int32_t>(x);
  return bits ^ ((bits >> 31) & 0x7fffffff);
}
/// The inverse of sort_key.
constexpr float float_from_sort_key(std::int32_t key) {
  return std::bit_cast<float>(key ^ ((key >> 31) & 0x7fffffff));
}

/// Keys must be added in ascending order. The candidates then are in that order too: of equal
/// scores the first ones in the buffer are kept, and a later key whose score only equals the
/// threshold, the k-th best so far, can be dropped at once.
class Selection {
  static constexpr hn::ScalableTag<float> kFloats{};
  static constexpr hn::ScalableTag<std::int32_t> kInts{};
  static constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
  static constexpr std::int64_t kMinSortKey = sort_key(kMinusInfinity);

 public:
  explicit Selection(const SelectionPlan& plan, Scratch& scratch)
      : scores_(scratch.take<float>(plan.capacity()).data()),
        keys_(scratch.take<std::int32_t>(plan.capacity()).data()),
        plan_(plan) {}

  /// Adds the scores[i] of keys first_key + i for i in [begin, end). Reads whole vectors.
  void add(const float* HWY_RESTRICT scores, std::int64_t first_key, std::int64_t begin,
           std::int64_t end) {
    const auto lanes = static_cast<std::int64_t>(hn::Lanes(kFloats));
    if (count_ > plan_.prune_above) prune();
    const auto threshold = hn::Set(kFloats, threshold_);
    for (std::int64_t i = begin / lanes * lanes; i < end; i += lanes) {
      const auto score = hn::LoadU(kFloats, scores + i);
      auto is_candidate = hn::Gt(score, threshold);  // false for NaN and for -inf
      if (i < begin || i + lanes > end) {
        const auto index = hn::Iota(kInts, static_cast<std::int32_t>(i));
        const auto inside = hn::AndNot(hn::Lt(index, hn::Set(kInts, static_cast<int>(begin))),
                                       hn::Lt(index, hn::Set(kInts, static_cast<int>(end))));
        is_candidate = hn::And(is_candidate, hn::RebindMask(kFloats, inside));
      }
      if (hn::AllFalse(kFloats, is_candidate)) continue;
      append(score, hn::Iota(kInts, static_cast<std::int32_t>(first_key + i)), is_candidate);
    }
  }

  /// Adds scores of the given keys, which ascend and are greater than all added before. Reads whole
  /// vectors.
  void add(const float* HWY_RESTRICT scores, const std::int32_t* HWY_RESTRICT keys,
           std::int64_t count) {
    const auto lanes = static_cast<std::int64_t>(hn::Lanes(kFloats));
    for (std::int64_t i = 0; i < count; i += lanes) {
      if (count_ > plan_.prune_above) prune();
      const auto score = hn::LoadU(kFloats, scores + i);
      const auto in_range = hn::FirstN(kFloats, static_cast<std::size_t>(count - i));
      append(score, hn::LoadU(kInts, keys + i),
             hn::And(in_range, hn::Gt(score, hn::Set(kFloats, threshold_))));
    }
  }

  /// Returns the number of selected keys; scores() and keys() hold them by ascending key.
  std::int64_t finish() {
    if (count_ > plan_.topk) prune();
    return count_;
  }
  const float* scores() const { return scores_; }
  const std::int32_t* keys() const { return keys_; }

 private:
  using Floats = hn::Vec<decltype(kFloats)>;
  using Ints = hn::Vec<decltype(kInts)>;
  using Mask = hn::Mask<decltype(kFloats)>;

  static HWY_INLINE std::int64_t count(Mask mask) {
    return static_cast<std::int64_t>(hn::CountTrue(kFloats, mask));
  }

  /// Appends the lanes of `mask`. Compresses in registers and stores a whole vector, since
  /// compressing stores are slow on some CPUs.
  HWY_INLINE void append(Floats score, Ints key, Mask mask) {
    hn::StoreU(hn::Compress(score, mask), kFloats, scores_ + count_);
    hn::StoreU(hn::Compress(key, hn::RebindMask(kInts, mask)), kInts, keys_ + count_);
    count_ += count(mask);
  }

  /// Pads the candidates to whole vectors with -inf, which count_above does not count.
  void pad() { std::fill_n(scores_ + count_, hn::Lanes(kFloats), kMinusInfinity); }

  std::int64_t count_above(float bound) const {
    const auto lanes = static_cast<std::int64_t>(hn::Lanes(kFloats));
    const auto limit = hn::Set(kFloats, bound);
    std::int64_t above = 0;
    for (std::int64_t i = 0; i < count_; i += lanes) {
      above += count(hn::Gt(hn::LoadU(kFloats, scores_ + i), limit));
    }
    return above;
  }

  float largest() const {
    const auto lanes = static_cast<std::int64_t>(hn::Lanes(kFloats));
    auto max = hn::LoadU(kFloats, scores_);
    for (std::int64_t i = lanes; i < count_; i += lanes)
      max = hn::Max(max, hn::LoadU(kFloats, scores_ + i));
    return hn::GetLane(hn::MaxOfLanes(kFloats, max));
  }

  /// Keeps the topk best candidates.
  HWY_NOINLINE void prune() {
    if (count_ <= plan_.topk) return;
    pad();
    // Bisection over the sort keys: topk or more scores are above `low`, fewer than topk above
    // `high`. No candidate is below the threshold, so all are above the sort key two before it; one
    // before would not do, since it may be that of -0, which equals +0.
    std::int64_t low = std::max(sort_key(threshold_) - std::int64_t{2}, kMinSortKey);
    std::int64_t high = sort_key(largest());
    std::int64_t above_high = 0;
    while (high - low > 1) {
      const auto middle = static_cast<std::int32_t>(low + (high - low) / 2);
      const std::int64_t above = count_above(float_from_sort_key(middle));
      if (above < plan_.topk) {
        high = middle;
        above_high = above;
      } else {
        low = middle;
        if (above == plan_.topk) break;
      }
    }
    if (high - low > 1) {
      keep(float_from_sort_key(static_cast<std::int32_t>(low)), 0);
    } else {
      keep(float_from_sort_key(static_cast<std::int32_t>(high)), plan_.topk - above_high);
    }
  }

  /// Keeps the scores above `bound`, which becomes the threshold, and the first `equals` of those
  /// that equal it.
  void keep(float bound, std::int64_t equals) {
    const auto lanes = static_cast<std::int64_t>(hn::Lanes(kFloats));
    const auto limit = hn::Set(kFloats, bound);
    const std::int64_t end = count_;
    count_ = 0;
    for (std::int64_t i = 0; i < end; i += lanes) {
      const auto score = hn::LoadU(kFloats, scores_ + i);
      const auto key = hn::LoadU(kInts, keys_ + i);
      auto kept = hn::Gt(score, limit);
      if (equals > 0) {
        auto equal = hn::Eq(score, limit);
        std::int64_t found = count(equal);
        if (found > equals) {
          auto first = hn::Lanes(kFloats);
          while (count(hn::And(equal, hn::FirstN(kFloats, first))) > equals) --first;
          equal = hn::And(equal, hn::FirstN(kFloats, first));
          found = equals;
        }
        equals -= found;
        kept = hn::Or(kept, equal);
      }
      append(score, key, kept);
    }
    threshold_ = bound;
  }

  float* scores_;
  std::int32_t* keys_;
  SelectionPlan plan_;
  std::int64_t count_ = 0;
  float threshold_ = kMinusInfinity;
};

}  // namespace winnow::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // include guard per target
