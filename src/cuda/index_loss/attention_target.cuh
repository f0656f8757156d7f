// SPDX-License-Identifier: Apache-2.0
// The indexer's target from the lse of attention, for index_target and dense_index_loss.
#pragma once

#include "cuda/index_loss/head_sum.cuh"
#include "winnow/tensor.h"

namespace winnow::cuda {

struct AttentionTarget {
  Tensor q;     // [tokens, heads, qk_dim]
  Tensor kv;    // [keys, qk_dim]
  Tensor sink;  // [heads], or absent
  Tensor lse;   // [tokens, heads]
  float scale;
  SlotLists slots;
  HeadSums target;          // [tokens, slots]
  bool accumulate = false;  // to what target holds
};

/// Computes target[t, j] = sum_h p[t, h, j], or adds that to it.
void sum_probabilities(const AttentionTarget& call, cudaStream_t stream);

}  // namespace winnow::cuda
