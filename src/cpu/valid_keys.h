// SPDX-License-Identifier: Apache-2.0
// The keys of a query row, without the slots that hold none.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/view.h"

namespace winnow::cpu {

/// Goes through the slots of row t that stand before `lengths` and name a key in [0, keys).
class ValidKeys {
 public:
  ValidKeys(const Tensor& indices, const Tensor& lengths, std::int64_t keys, std::int64_t t)
      : slots_(slice_data(indices, t)), keys_(keys) {
    const std::int64_t topk = indices.shape[1];
    end_ =
        lengths ? std::clamp<std::int64_t>(View<const std::int32_t, 1>(lengths)(t), 0, topk) : topk;
  }

  /// The next keys, `most` of them or all that are left, in the order of their slots.
  std::int64_t take(std::int64_t most, std::int32_t* taken) {
    std::int64_t count = 0;
    for (; next_ < end_ && count < most; ++next_) {
      taken[count] = slots_[next_];
      // Without a branch: slots without a key may stand anywhere.
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
