// SPDX-License-Identifier: Apache-2.0
// The sizes of a sparse attention call, and how its heads are split into groups.
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

/// Splits the heads into groups of nearly equal size, all but the last a multiple of kVector. The
/// split depends on heads and dimensions alone, so that results do not depend on anything else.
class HeadGroups {
 public:
  /// A group has at most `max_heads` heads, fewer if qk_dim exceeds 576 so that heads * qk_dim
  /// stays below max_heads * 576, and at least kVector.
  HeadGroups(std::int64_t heads, std::int64_t qk_dim, std::int64_t max_heads) : heads_(heads) {
    const std::int64_t limit = std::min(max_heads, max_heads * 576 / qk_dim);
    const std::int64_t fitting = std::max<std::int64_t>(limit / kVector, 1) * kVector;
    const std::int64_t groups = ceil_div(heads, fitting);
    max_size_ = ceil_div(ceil_div(heads, groups), kVector) * kVector;
  }

  std::int64_t count() const { return ceil_div(heads_, max_size_); }
  std::int64_t max_size() const { return std::min(max_size_, heads_); }
  HeadRange operator[](std::int64_t i) const {
    return {i * max_size_, std::min(max_size_, heads_ - i * max_size_)};
  }

 private:
  static constexpr std::int64_t kVector = 16;  // floats in the widest vector
  std::int64_t heads_;
  std::int64_t max_size_;
};

}  // namespace winnow::cpu
