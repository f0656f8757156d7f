// SPDX-License-Identifier: Apache-2.0
// The slots of a query row in the indexer's backward: those with a key, in blocks, and what one
// pass notes of them for the next.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "core/threads.h"
#include "core/view.h"
#include "cpu/index_gradient.h"
#include "winnow/index_topk.h"

namespace winnow::cpu {

/// Slots that are worked on together: the depth of the product for d_q.
inline constexpr std::int64_t kSlotBlock = 128;

/// What the first pass leaves for the second about one query row.
struct RowNotes {
  std::uint8_t* signs;    // [topk, sign_bytes]  where a > 0
  std::int32_t* slots;    // [topk]              those with a key, by ranges
  std::int32_t* offsets;  // [ranges + 1]        where in `slots` a range begins
  bool* is_finite;        // [1]                 whether all of q is

  static std::size_t bytes(const IndexGradientPlan& plan) {
    return Scratch::bytes<std::uint8_t>(plan.topk * plan.sign_bytes) +
           Scratch::bytes<std::int32_t>(plan.topk) + Scratch::bytes<std::int32_t>(plan.ranges + 1) +
           Scratch::bytes<bool>(1);
  }
  RowNotes(const IndexGradientPlan& plan, std::byte* memory) {
    Scratch scratch(memory, plan.note_bytes);
    signs = scratch.take<std::uint8_t>(plan.topk * plan.sign_bytes).data();
    slots = scratch.take<std::int32_t>(plan.topk).data();
    offsets = scratch.take<std::int32_t>(plan.ranges + 1).data();
    is_finite = scratch.take<bool>(1).data();
  }
};

/// Some slots of a row that hold a key.
struct SlotBlock {
  std::int64_t count;
  std::int32_t keys[kSlotBlock];
  std::int32_t slots[kSlotBlock];
  float d_scores[kSlotBlock];
};

/// The slots of query row t, in their order, without those that hold no key of the window.
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
  bool has_key(std::int64_t j) const { return indices_[j] >= begin_ && indices_[j] < end_; }
  std::int64_t length() const { return length_; }
  std::int32_t key(std::int64_t j) const { return indices_[j]; }

  void take(SlotBlock& block) {
    block.count = 0;
    for (; next_ < length_ && block.count < kSlotBlock; ++next_) {
      if (has_key(next_)) put(next_, block);
    }
  }
  void put(std::int64_t j, SlotBlock& block) const {
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

/// Notes the slots of a row range by range, by counting; within a range they keep their order.
inline void note_slots(const RowSlots& row, const IndexGradientPlan& plan, const RowNotes& notes) {
  std::fill_n(notes.offsets, plan.ranges + 1, 0);
  for (std::int64_t j = 0; j < row.length(); ++j) {
    if (row.has_key(j)) ++notes.offsets[row.key(j) >> plan.range_shift];
  }
  std::int32_t end = 0;
  for (std::int64_t i = 0; i <= plan.ranges; ++i) end = notes.offsets[i] += end;
  for (std::int64_t j = row.length() - 1; j >= 0; --j) {
    if (!row.has_key(j)) continue;
    notes.slots[--notes.offsets[row.key(j) >> plan.range_shift]] = static_cast<std::int32_t>(j);
  }
}

}  // namespace winnow::cpu
