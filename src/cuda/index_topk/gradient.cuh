// SPDX-License-Identifier: Apache-2.0
// The gradients of the indexer's scores, for index_topk and for dense_index_loss.
#pragma once

#include <cstdint>
#include <string>

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
void index_gradient_general(const IndexGradient& call, const TermPlan& plan,
                            const TermMemory& memory, cudaStream_t stream);
/// The same on Hopper, with plans of whole rows only.
void index_gradient_sm90(const IndexGradient& call, const TermPlan& plan, const TermMemory& memory,
                         cudaStream_t stream);
/// Why it does not take these tensors, or an empty string.
std::string why_not_gradient_sm90(const Tensor& q, const Tensor& k, const Tensor& d_q,
                                  const Tensor& d_k);

/// The better of the two that can. It is asked once for all rows of a call: of a few rows Hopper's
/// kernel may take what it does not take of all, and a row's bits would depend on its place.
using IndexGradientKernel = void (*)(const IndexGradient&, const TermPlan&, const TermMemory&,
                                     cudaStream_t);
IndexGradientKernel choose_index_gradient(const Tensor& q, const Tensor& k, const Tensor& d_q,
                                          const KeySums& d_k, const TermPlan& plan);

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

/// The same of a call, with `slots` slots of each row from first_slot on.
inline IndexGradient part_of(const IndexGradient& call, std::int64_t first_row, std::int64_t rows,
                             std::int64_t first_slot, std::int64_t slots) {
  IndexGradient part = call;
  for (Tensor* tensor : {&part.q, &part.weights, &part.d_q, &part.d_weights}) {
    *tensor = rows_of(*tensor, first_row, rows);
  }
  part.slots = call.slots.part(first_row, first_slot, slots);
  part.d_scores += first_row * call.d_scores_stride + first_slot;
  return part;
}

/// The terms of a part, in place of its d_k.
inline KeySums terms_of(const IndexGradient& part, const TermMemory& memory) {
  return {.data = memory.terms,
          .stride = part.d_k.dim,
          .keys = part.q.shape[0] * part.slots.slots,
          .dim = part.d_k.dim};
}

}  // namespace winnow::cuda
