// SPDX-License-Identifier: Apache-2.0
// Iterates over the keys of a query row, skipping invalid slots.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/view.h"

namespace winnow::cpu {

/// The keys of row t: indices in slots below `lengths` that are in [0, keys).
class ValidKeys {
 public:
  ValidKeys(const Tensor& indices, const Tensor& lengths, std::int64_t keys, std::int64_t t)
      : slots_(slice_data(indices, t)), keys_(keys) {
    const std::int64_t topk = indices.shape[1];
    end_ =
        lengths ? std::clamp<std::int64_t>(View<const std::int32_t, 1>(lengths)(t), 0, topk) : topk;
  }

  /// Writes the next keys in the order of their slots, at max_count `max_count`; returns how many.
  std::int64_t take(std::int64_t max_count, std::int32_t* taken) {
    std::int64_t count = 0;
    for (; next_ < end_ && count < max_count; ++next_) {
      taken[count] = slots_[next_];
      // Branch-free, since invalid slots may be anywhere.
      count += static_cast<std::uint32_t>(slots_[next_]) < static_cast<std::uint64_t>(keys_);
    }
    return count;
  }

 private:
  static const std::int32_t* slice_data(const Tensor& indices, std::int64_t t) {
    return static_cast<const std::int32_t*>(slice(indices, t).data);
  }

  const std::int32_t* slots_;
  std::int64_t keys_;
  std::int64_t next_ = 0;
  std::int64_t end_ = 0;
};

}  // namespace winnow::cpu
