// SPDX-License-Identifier: Apache-2.0
// The KL divergence of index_loss and dense_index_loss.
#pragma once

#include <cstdint>

#include <cuda_runtime_api.h>

#include "cuda/common/row_slots.cuh"

namespace winnow::cuda {

struct Divergence {
  SlotLists slots;
  const float* scores;  // [tokens, slots]
  const float* target;  // [tokens, slots]
  float* loss;          // [tokens], or null
  float* d_scores;      // [tokens, slots], or null; may be `scores`
  const float* d_loss;  // [tokens], or null for 1; a d_score of 0 stays 0 whatever it is
  std::int64_t scores_stride, target_stride, d_scores_stride;
  std::int64_t tokens;
};

/// Computes KL(target / sum target || softmax(scores)) over the slots with a key whose score is not
/// -inf, and its gradient times d_loss. With a list every slot gets a gradient, with a window every
/// key.
void compute_divergence(const Divergence& call, cudaStream_t stream);

}  // namespace winnow::cuda
