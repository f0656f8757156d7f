// SPDX-License-Identifier: Apache-2.0
// The memory of a selection (select-inl.h).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "core/threads.h"

namespace winnow::cpu {

/// Sizes of a selection, independent of the SIMD target.
struct SelectionPlan {
  std::int64_t topk;
  std::int64_t prune_above;  // with more candidates, the buffer is pruned before the next block

  static constexpr std::int64_t kBlock = 64;  // number of scores that may be added at once
  static constexpr std::int64_t kSlack = 64;  // whole vectors are stored after the last candidate

  SelectionPlan(std::int64_t keys, std::int64_t selected)
      : topk(std::min(selected, keys)),
        prune_above(std::min(keys, std::max(2 * topk, topk + 512))) {}

  std::int64_t capacity() const { return prune_above + kBlock + kSlack; }
  std::size_t bytes() const {
    return Scratch::bytes<float>(capacity()) + Scratch::bytes<std::int32_t>(capacity());
  }
};

}  // namespace winnow::cpu
