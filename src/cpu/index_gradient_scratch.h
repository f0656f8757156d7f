// SPDX-License-Identifier: Apache-2.0
// Scratch of a lane in the two passes of the indexer's backward, in floats or in pairs of bf16.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "core/threads.h"
#include "cpu/elements.h"
#include "cpu/index_gradient.h"
#include "cpu/index_slots.h"
#include "cpu/simd.h"

namespace winnow::cpu {

/// Of the first pass, whose tasks are query rows.
template <class Element>
struct QueryGradientScratch {
  static constexpr bool kArePairs = kElementDepth<Element> == 2;

  static std::size_t bytes(const IndexGradientPlan& plan) {
    const std::int64_t depth = elements_of<Element>(plan.dim);
    const std::size_t along_slots =
        kArePairs ? Scratch::bytes<Element>(elements_of<Element>(kSlotBlock) * plan.row_stride) : 0;
    return Scratch::bytes<Element>(depth * plan.head_stride) +
           Scratch::bytes<Element>(kSlotBlock * padded_stride(depth)) + along_slots +
           Scratch::bytes<Element>(elements_of<Element>(kSlotBlock) * plan.head_stride) +
           Scratch::bytes<float>(plan.heads * plan.row_stride) +
           2 * Scratch::bytes<float>(plan.head_stride);
  }
  QueryGradientScratch(const IndexGradientPlan& plan, Scratch scratch)
      : depth(elements_of<Element>(plan.dim)),
        key_stride(padded_stride(depth)),
        q(scratch.take<Element>(depth * plan.head_stride).data()),
        keys(scratch.take<Element>(kSlotBlock * key_stride).data()),
        keys_along_slots(
            kArePairs
                ? scratch.take<Element>(elements_of<Element>(kSlotBlock) * plan.row_stride).data()
                : keys),
        factors(scratch.take<Element>(elements_of<Element>(kSlotBlock) * plan.head_stride).data()),
        d_q(scratch.take<float>(plan.heads * plan.row_stride)),
        weights(scratch.take<float>(plan.head_stride)),
        d_weights(scratch.take<float>(plan.head_stride)) {}

  std::int64_t depth, key_stride;
  Element* q;                  // [depth, heads]
  Element* keys;               // [kSlotBlock, depth]
  Element* keys_along_slots;   // [kSlotBlock in elements, dim]    the same keys
  Element* factors;            // [kSlotBlock in elements, heads]  of the keys in d_q
  std::span<float> d_q;        // [heads, dim]
  std::span<float> weights;    // [heads]
  std::span<float> d_weights;  // [heads]
};

/// Of the second pass, whose tasks are ranges of keys.
template <class Element>
struct KeyGradientScratch {
  static std::size_t bytes(const IndexGradientPlan& plan) {
    const std::int64_t depth = elements_of<Element>(plan.heads);
    return Scratch::bytes<Element>(depth * plan.row_stride) +
           Scratch::bytes<Element>(kSlotBlock * padded_stride(depth)) +
           Scratch::bytes<Element>(padded_stride(depth));
  }
  KeyGradientScratch(const IndexGradientPlan& plan, Scratch& scratch)
      : depth(elements_of<Element>(plan.heads)),
        factor_stride(padded_stride(depth)),
        q(scratch.take<Element>(depth * plan.row_stride).data()),
        factors(scratch.take<Element>(kSlotBlock * factor_stride).data()),
        weights(scratch.take<Element>(factor_stride)) {}

  std::int64_t depth, factor_stride;
  Element* q;                  // [depth, dim]
  Element* factors;            // [kSlotBlock, depth]  of q in d_k
  std::span<Element> weights;  // [depth]
};

/// Bytes that suffice for a task of either pass; the second one has `copied_keys` rows of d_k in
/// addition. A row of the first one is of floats or of pairs; in the second one rows of both meet.
inline std::size_t gradient_scratch_bytes(const IndexGradientPlan& plan, std::int64_t copied_keys,
                                          bool may_have_pairs) {
  std::size_t query_bytes = QueryGradientScratch<float>::bytes(plan);
  std::size_t key_bytes =
      KeyGradientScratch<float>::bytes(plan) + Scratch::bytes<float>(copied_keys * plan.row_stride);
  if (may_have_pairs) {
    query_bytes = std::max(query_bytes, QueryGradientScratch<Bf16Pair>::bytes(plan));
    key_bytes += KeyGradientScratch<Bf16Pair>::bytes(plan);
  }
  return std::max(query_bytes, key_bytes);
}

}  // namespace winnow::cpu
