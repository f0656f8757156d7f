// SPDX-License-Identifier: Apache-2.0
// Which keys a query row attends to: those of a list, or all of its window. Illegal values
// (negative lengths, windows past the keys) give fewer slots, but never a row that is no key.
#pragma once

#include <cstdint>

#include "cuda/common/clamp.cuh"

namespace winnow::cuda {

/// The slots of one row.
struct RowSlots {
  const std::int32_t* indices;  // from the first slot on; null: consecutive keys
  std::int32_t first;           // without a list: the index of the first slot
  std::int32_t begin;           // with a list, only indices in [begin, begin + size) are keys
  std::uint32_t size;
  std::int32_t count;  // of slots that may hold a key
  std::int32_t key_offset;

  /// The row of a slot's key, or -1.
  __device__ std::int32_t key(std::int64_t slot) const {
    if (slot >= count) return -1;
    if (indices == nullptr) return key_offset + first + static_cast<std::int32_t>(slot);
    // In unsigned arithmetic an index before the first key is past the last.
    const std::int32_t index = indices[slot];
    const std::uint32_t distance =
        static_cast<std::uint32_t>(index) - static_cast<std::uint32_t>(begin);
    return distance < size ? key_offset + index : -1;
  }
};

/// The slots of all rows, or of every row the `slots` slots from first_slot on.
struct SlotLists {
  const std::int32_t* indices = nullptr;  // [tokens, slots], or null: the window, key by key
  const std::int32_t* lengths = nullptr;  // [tokens], or null
  const std::int32_t* begin = nullptr;    // [tokens], or null: all keys
  const std::int32_t* end = nullptr;      // [tokens], or null
  std::int64_t indices_stride = 0;
  std::int64_t first_slot = 0;
  std::int64_t slots = 0;       // per row, from first_slot on; below 2^31
  std::int64_t keys = 0;        // indices are smaller than this; at most 2^31
  std::int64_t key_offset = 0;  // the row of index 0

  /// The rows from first_row on, and of each `count` slots from `first` on.
  SlotLists part(std::int64_t first_row, std::int64_t first, std::int64_t count) const {
    SlotLists part = *this;
    if (indices != nullptr) part.indices += first_row * indices_stride;
    if (lengths != nullptr) part.lengths += first_row;
    if (begin != nullptr) part.begin += first_row;
    if (end != nullptr) part.end += first_row;
    part.first_slot += first;
    part.slots = count;
    return part;
  }

  __device__ RowSlots row(std::int64_t t) const {
    std::int64_t first_key = 0;
    std::int64_t end_key = keys;
    if (begin != nullptr) {
      first_key = clamp(begin[t], 0, keys);
      end_key = clamp(end[t], first_key, keys);
    }
    RowSlots row{};
    std::int64_t end_slot = first_slot + slots;
    if (indices == nullptr) {
      row.first = static_cast<std::int32_t>(first_key + first_slot);
      end_slot = end_key - first_key;
    } else {
      row.indices = indices + t * indices_stride + first_slot;
      if (lengths != nullptr) end_slot = lengths[t];
    }
    row.begin = static_cast<std::int32_t>(first_key);
    row.size = static_cast<std::uint32_t>(end_key - first_key);
    row.count = static_cast<std::int32_t>(clamp(end_slot - first_slot, 0, slots));
    row.key_offset = static_cast<std::int32_t>(key_offset);
    return row;
  }
};

}  // namespace winnow::cuda
