// SPDX-License-Identifier: Apache-2.0
// Products over whole windows on Hopper, for dense_index_loss: the lse of attention, the indexer's
// target and its scores.
#pragma once

#include <string>

#include "cuda/index_loss/attention_target.cuh"

namespace winnow::cuda {

/// Empty if the functions below take the tensors of a dense_index_loss.
std::string why_not_windows_sm90(const Tensor& q, const Tensor& kv, const Tensor& index_q,
                                 const Tensor& index_k);

/// sum_probabilities over windows; the call has no list of indices.
void sum_window_probabilities_sm90(const AttentionTarget& call, cudaStream_t stream);

/// Computes lse[t, h] = log(sum_s exp(logit)) over the window of every row; sink and target of the
/// call are not used.
void compute_window_lse_sm90(const AttentionTarget& call, cudaStream_t stream);

/// The indexer's scores over windows: sum_h weights[t, h] * max(q[t, h] . k[s], 0).
struct IndexScores {
  Tensor q;        // [tokens, index_heads, index_dim]
  Tensor k;        // [index_keys, index_dim]
  Tensor weights;  // [tokens, index_heads]
  SlotLists slots;
  HeadSums scores;  // [tokens, slots]
};
void sum_window_scores_sm90(const IndexScores& call, cudaStream_t stream);

}  // namespace winnow::cuda
