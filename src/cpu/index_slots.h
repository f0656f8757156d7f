// SPDX-License-Identifier: Apache-2.0
// The slots of a query row in the indexer's backward: iteration over the valid ones in blocks, and
// what the first pass records about them for the second.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "core/threads.h"
#include "core/view.h"
#include "cpu/index_gradient.h"
#include "winnow/index_topk.h"

namespace winnow::cpu {

/// Number of slots that are multiplied together: the depth of the product for d_q.
inline constexpr std::int64_t kSlotBlock = 128;

/// What the first pass saves about one query row for the second.
struct RowRecord {
  std::uint8_t* signs;    // [topk, sign_bytes]  one bit per head: a > 0
  std::int32_t* slots;    // [topk]              valid slots, sorted by range of keys
  std::int32_t* offsets;  // [ranges + 1]        where each range begins in `slots`
  bool* is_finite;        // [1]                 whether all of q is finite
  bool* are_pairs;        // [1]                 whether pairs of bf16 are multiplied

  static std::size_t bytes(const IndexGradientPlan& plan) {
    return Scratch::bytes<std::uint8_t>(plan.topk * plan.sign_bytes) +
           Scratch::bytes<std::int32_t>(plan.topk) + Scratch::bytes<std::int32_t>(plan.ranges + 1) +
           2 * Scratch::bytes<bool>(1);
  }
  RowRecord(const IndexGradientPlan& plan, std::byte* memory) {
    Scratch scratch(memory, plan.record_bytes);
    signs = scratch.take<std::uint8_t>(plan.topk * plan.sign_bytes).data();
    slots = scratch.take<std::int32_t>(plan.topk).data();
    offsets = scratch.take<std::int32_t>(plan.ranges + 1).data();
    is_finite = scratch.take<bool>(1).data();
    are_pairs = scratch.take<bool>(1).data();
  }
};

/// A block of valid slots of a row.
struct SlotBlock {
  std::int64_t count;
  std::int32_t keys[kSlotBlock];
  std::int32_t slots[kSlotBlock];
  float d_scores[kSlotBlock];
};

/// Iterates over the valid slots of query row t, those whose key is in the window, in their order.
class RowSlots {
 public:
  RowSlots(const IndexTopkBackward& args, std::int64_t t)
      : begin_(View<const std::int32_t, 1>(args.begin)(t)),
        end_(View<const std::int32_t, 1>(args.end)(t)),
        length_(args.indices.shape[1]),
        indices_(&View<const std::int32_t, 2>(args.indices)(t, 0)),
        d_scores_(&View<const float, 2>(args.d_scores)(t, 0)) {
    if (args.lengths)
      length_ = std::min<std::int64_t>(length_, View<const std::int32_t, 1>(args.lengths)(t));
  }
  bool is_valid(std::int64_t j) const { return indices_[j] >= begin_ && indices_[j] < end_; }
  std::int64_t length() const { return length_; }
  std::int32_t key(std::int64_t j) const { return indices_[j]; }

  /// Fills `block` with the next valid slots; count is 0 at the end.
  void next_block(SlotBlock& block) {
    block.count = 0;
    for (; next_ < length_ && block.count < kSlotBlock; ++next_) {
      if (is_valid(next_)) append(next_, block);
    }
  }
  void append(std::int64_t j, SlotBlock& block) const {
    block.keys[block.count] = indices_[j];
    block.slots[block.count] = static_cast<std::int32_t>(j);
    block.d_scores[block.count] = d_scores_[j];
    ++block.count;
  }

 private:
  std::int64_t begin_, end_, length_;
  const std::int32_t* indices_;
  const float* d_scores_;
  std::int64_t next_ = 0;
};

/// Sorts the valid slots of a row by range of keys, with a stable counting sort.
inline void sort_slots_by_range(const RowSlots& row, const IndexGradientPlan& plan,
                                const RowRecord& record) {
  std::fill_n(record.offsets, plan.ranges + 1, 0);
  for (std::int64_t j = 0; j < row.length(); ++j) {
    if (row.is_valid(j)) ++record.offsets[row.key(j) >> plan.range_shift];
  }
  std::int32_t end = 0;
  for (std::int64_t i = 0; i <= plan.ranges; ++i) end = record.offsets[i] += end;
  for (std::int64_t j = row.length() - 1; j >= 0; --j) {
    if (!row.is_valid(j)) continue;
    record.slots[--record.offsets[row.key(j) >> plan.range_shift]] = static_cast<std::int32_t>(j);
  }
}

}  // namespace winnow::cpu
