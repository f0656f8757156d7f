// SPDX-License-Identifier: Apache-2.0
// The exact top-k of a stream of scores: a running threshold and a buffer of survivors, cut now and
// then. Included once per SIMD target.

#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>
#include <span>

#include <hwy/highway.h>

#include "core/threads.h"

#ifndef WINNOW_CPU_SELECT_INL_H_ONCE_
#define WINNOW_CPU_SELECT_INL_H_ONCE_
namespace winnow::cpu {

/// Sizes of a selection, the same on every SIMD target.
struct SelectionPlan {
  std::int64_t topk;
  std::int64_t most;  // survivors before which a block of scores is added without a cut

  static constexpr std::int64_t kBlock = 64;  // scores that may be added at once
  static constexpr std::int64_t kSlack = 64;  // whole vectors are stored behind the last survivor

  SelectionPlan(std::int64_t keys, std::int64_t selected)
      : topk(std::min(selected, keys)), most(std::min(keys, std::max(2 * topk, topk + 512))) {}

  std::int64_t capacity() const { return most + kBlock + kSlack; }
  std::size_t bytes() const {
    return Scratch::bytes<float>(capacity()) + Scratch::bytes<std::int32_t>(capacity());
  }
};

}  // namespace winnow::cpu
#endif

#if defined(WINNOW_CPU_SELECT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef WINNOW_CPU_SELECT_INL_H_
#undef WINNOW_CPU_SELECT_INL_H_
#else
#define WINNOW_CPU_SELECT_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace winnow::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

/// The integer at a float's place in the order of all floats; -0 stands right before +0.
constexpr std::int32_t place_of(float x) {
  const auto bits = std::bit_cast<std::int32_t>(x);
  return bits ^ ((bits >> 31) & 0x7fffffff);
}
constexpr float float_at(std::int32_t place) {
  return std::bit_cast<float>(place ^ ((place >> 31) & 0x7fffffff));
}

/// Keys must come in ascending order. The survivors then stand in that order too, so that of equal
/// scores the first in the buffer are those to keep, and a later key that only equals the k-th best
/// of its predecessors can be dropped at once.
class Selection {
  static constexpr hn::ScalableTag<float> kFloats{};
  static constexpr hn::ScalableTag<std::int32_t> kInts{};
  static constexpr float kNever = -std::numeric_limits<float>::infinity();
  static constexpr std::int64_t kLowest = place_of(kNever);

 public:
  explicit Selection(const SelectionPlan& plan, Scratch& scratch)
      : scores_(scratch.take<float>(plan.capacity()).data()),
        keys_(scratch.take<std::int32_t>(plan.capacity()).data()),
        plan_(plan) {}

  /// scores[i] for i in [begin, end) is the score of key first_key + i. Reads whole vectors.
  void add(const float* HWY_RESTRICT scores, std::int64_t first_key, std::int64_t begin,
           std::int64_t end) {
    const auto lanes = static_cast<std::int64_t>(hn::Lanes(kFloats));
    if (count_ > plan_.most) cut();
    const auto threshold = hn::Set(kFloats, threshold_);
    for (std::int64_t i = begin / lanes * lanes; i < end; i += lanes) {
      const auto score = hn::LoadU(kFloats, scores + i);
      auto survives = hn::Gt(score, threshold);  // never for NaN, never for -inf
      if (i < begin || i + lanes > end) {
        const auto place = hn::Iota(kInts, static_cast<std::int32_t>(i));
        const auto inside = hn::AndNot(hn::Lt(place, hn::Set(kInts, static_cast<int>(begin))),
                                       hn::Lt(place, hn::Set(kInts, static_cast<int>(end))));
        survives = hn::And(survives, hn::RebindMask(kFloats, inside));
      }
      if (hn::AllFalse(kFloats, survives)) continue;
      append(score, hn::Iota(kInts, static_cast<std::int32_t>(first_key + i)), survives);
    }
  }

  /// Scores of keys in ascending order, all behind those added so far. Reads whole vectors.
  void add(const float* HWY_RESTRICT scores, const std::int32_t* HWY_RESTRICT keys,
           std::int64_t count) {
    const auto lanes = static_cast<std::int64_t>(hn::Lanes(kFloats));
    for (std::int64_t i = 0; i < count; i += lanes) {
      if (count_ > plan_.most) cut();
      const auto score = hn::LoadU(kFloats, scores + i);
      const auto here = hn::FirstN(kFloats, static_cast<std::size_t>(count - i));
      append(score, hn::LoadU(kInts, keys + i),
             hn::And(here, hn::Gt(score, hn::Set(kFloats, threshold_))));
    }
  }

  /// The number of selected; scores() and keys() hold them, by ascending key.
  std::int64_t finish() {
    if (count_ > plan_.topk) cut();
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

  /// The register form of compress and a whole store: storing through the mask is slow on some
  /// CPUs.
  HWY_INLINE void append(Floats score, Ints key, Mask mask) {
    hn::StoreU(hn::Compress(score, mask), kFloats, scores_ + count_);
    hn::StoreU(hn::Compress(key, hn::RebindMask(kInts, mask)), kInts, keys_ + count_);
    count_ += count(mask);
  }

  /// Puts -inf, which never counts, behind the survivors up to a whole vector.
  void pad() { std::fill_n(scores_ + count_, hn::Lanes(kFloats), kNever); }

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
    auto most = hn::LoadU(kFloats, scores_);
    for (std::int64_t i = lanes; i < count_; i += lanes)
      most = hn::Max(most, hn::LoadU(kFloats, scores_ + i));
    return hn::GetLane(hn::MaxOfLanes(kFloats, most));
  }

  /// Leaves the topk best.
  HWY_NOINLINE void cut() {
    if (count_ <= plan_.topk) return;
    pad();
    // Bisection over the floats: topk or more lie above `low`, fewer than topk above `high`. No
    // survivor is below the threshold; two places before it, one more than from +0 to -0, all are
    // above.
    std::int64_t low = std::max(place_of(threshold_) - std::int64_t{2}, kLowest);
    std::int64_t high = place_of(largest());
    std::int64_t above_high = 0;
    while (high - low > 1) {
      const auto middle = static_cast<std::int32_t>(low + (high - low) / 2);
      const std::int64_t above = count_above(float_at(middle));
      if (above < plan_.topk) {
        high = middle;
        above_high = above;
      } else {
        low = middle;
        if (above == plan_.topk) break;
      }
    }
    if (high - low > 1) {
      keep(float_at(static_cast<std::int32_t>(low)), 0);
    } else {
      keep(float_at(static_cast<std::int32_t>(high)), plan_.topk - above_high);
    }
  }

  /// Keeps what lies above `bound`, which becomes the threshold, and the first `equals` of what
  /// equals it.
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
  float threshold_ = kNever;
};

}  // namespace winnow::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // include guard per target
