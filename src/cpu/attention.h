// SPDX-License-Identifier: Apache-2.0
// Sizes of a call of sparse attention, and how its heads are grouped.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/simd.h"
#include "winnow/sparse_attention.h"

namespace winnow::cpu {

struct AttentionSizes {
  std::int64_t tokens, heads, qk_dim, v_dim, keys, topk;
};

template <class Args>
AttentionSizes attention_sizes(const Args& args) {
  return {args.q.shape[0],   args.q.shape[1],  args.q.shape[2],
          args.out.shape[2], args.kv.shape[0], args.indices.shape[1]};
}

struct HeadRange {
  std::int64_t begin, count;
};

/// Heads in groups of nearly equal size, each a multiple of a vector but for the last. The grouping
/// depends on heads and dimensions alone, so that a row's bits do too.
class HeadGroups {
 public:
  /// A group has at most `most_heads`, and fewer where heads * qk_dim would pass most_heads * 576,
  /// but at least a vector's.
  HeadGroups(std::int64_t heads, std::int64_t qk_dim, std::int64_t most_heads) : heads_(heads) {
    const std::int64_t most = std::min(most_heads, most_heads * 576 / qk_dim);
    const std::int64_t fitting = std::max<std::int64_t>(most / kVector, 1) * kVector;
    const std::int64_t groups = ceil_div(heads, fitting);
    most_ = ceil_div(ceil_div(heads, groups), kVector) * kVector;
  }

  std::int64_t count() const { return ceil_div(heads_, most_); }
  std::int64_t most() const { return std::min(most_, heads_); }
  HeadRange operator[](std::int64_t i) const {
    return {i * most_, std::min(most_, heads_ - i * most_)};
  }

 private:
  static constexpr std::int64_t kVector = 16;
  std::int64_t heads_;
  std::int64_t most_;
};

}  // namespace winnow::cpu
