// SPDX-License-Identifier: Apache-2.0
// The gradients of the indexer's scores, for index_topk and for dense_index_loss.
#pragma once

#include <cstdint>

#include "cuda/common/key_sums.cuh"
#include "cuda/common/row_slots.cuh"
#include "winnow/tensor.h"

namespace winnow::cuda {

struct IndexGradient {
  Tensor q;        // [tokens, index_heads, index_dim]
  Tensor k;        // [keys, index_dim]
  Tensor weights;  // [tokens, index_heads]
  SlotLists slots;
  const float* d_scores;  // [tokens, slots]
  std::int64_t d_scores_stride;
  bool zero_is_no_slot;  // a slot whose d_score is 0 touches nothing, whatever its key holds
  Tensor d_q;            // [tokens, index_heads, index_dim]
  Tensor d_weights;      // [tokens, index_heads]
  KeySums d_k;
};

/// Computes the formulas of IndexTopkBackward. Without a plan d_k is summed by atomics, with one
/// deterministically.
void index_gradient(const IndexGradient& call, const TermPlan& plan, const TermMemory& memory,
                    cudaStream_t stream);

/// The query rows [first, first + rows) of a tensor.
inline Tensor rows_of(Tensor tensor, std::int64_t first, std::int64_t rows) {
  if (!tensor) return tensor;
  if (tensor.data != nullptr) {
    tensor.data =
        static_cast<char*>(tensor.data) + first * tensor.stride[0] * element_bytes(tensor.dtype);
  }
  tensor.shape[0] = rows;
  return tensor;
}

}  // namespace winnow::cuda
