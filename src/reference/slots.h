// SPDX-License-Identifier: Apache-2.0
// The key that a slot of an index list refers to, if any.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/view.h"

namespace winnow::reference {

inline constexpr std::int64_t kNoKey = -1;

/// Index lists `indices` [tokens, topk]. A slot is valid if it is below `lengths` and its index is
/// in [0, keys).
class Slots {
 public:
  Slots(const Tensor& indices, const Tensor& lengths, std::int64_t keys)
      : indices_(indices), lengths_(lengths), topk_(indices.shape[1]), keys_(keys) {}

  /// The number of slots to visit in row t; all further ones are invalid.
  std::int64_t count(std::int64_t t) const {
    return lengths_ ? std::min<std::int64_t>(lengths_(t), topk_) : topk_;
  }
  bool has_key(std::int64_t t) const {
    for (std::int64_t j = 0; j < count(t); ++j) {
      if (key(t, j) != kNoKey) return true;
    }
    return false;
  }
  /// The key in slot j of row t, or kNoKey if the slot is invalid.
  std::int64_t key(std::int64_t t, std::int64_t j) const {
    if (j >= count(t)) return kNoKey;
    const std::int64_t index = indices_(t, j);
    return index >= 0 && index < keys_ ? index : kNoKey;
  }

 private:
  View<const std::int32_t, 2> indices_;
  View<const std::int32_t, 1> lengths_;
  std::int64_t topk_;
  std::int64_t keys_;
};

/// The key windows [begin, end) of the query rows.
class Windows {
 public:
  Windows(const Tensor& begin, const Tensor& end) : begin_(begin), end_(end) {}
  std::int64_t begin(std::int64_t t) const { return begin_(t); }
  std::int64_t end(std::int64_t t) const { return end_(t); }
  bool contain(std::int64_t t, std::int64_t key) const { return key >= begin_(t) && key < end_(t); }

 private:
  View<const std::int32_t, 1> begin_;
  View<const std::int32_t, 1> end_;
};

}  // namespace winnow::reference
