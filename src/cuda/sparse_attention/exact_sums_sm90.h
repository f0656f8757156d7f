// SPDX-License-Identifier: Apache-2.0
// Exact sums of key gradients on Hopper: sums that do not depend on the order of their terms.
//
// Every key gets a quantum, a power of two. Terms are rounded to whole quanta and added by fp32
// atomics as integers; as long as the magnitudes of all terms of a key add up to less than 2^24
// quanta, no addition rounds. What bounds them is computed first, from S and dP:
//
//   |term| of a slot  <=  b = sum over heads of |dS| max|q| + |P| max|d_out|
//
// The b of all slots that hold a key are summed as integers, so that the quantum does not depend on
// an order either. It is the least power of two that is at least 2^-23 of their sum: a term,
// rounded to nearest, is at most twice as large as before.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/common/key_sums.cuh"
#include "cuda/common/runtime.h"
#include "winnow/sparse_attention.h"

namespace winnow::cuda {

namespace sparse_attention::backward_sm90 {
struct HeadConstants;
}

/// The work in pieces of `rows` query rows, each of which has quanta of its own.
struct ExactPlan {
  std::int64_t rows = 0;  // 0: there is no room, or nothing to sum
  bool in_copy = false;   // a single piece, summed in the fp32 copy of d_kv
  std::size_t bytes = 0;  // of workspace, beside that copy
};
ExactPlan plan_exact_sums(const SparseAttentionBackward& args, std::size_t limit);

struct ExactSums {
  KeySums total;        // of all pieces; unless in_copy
  KeySums quanta_sums;  // of a piece, in fragment order
  bool in_copy;
  float* quanta;          // [keys]; 0: nothing was added
  float* inverse_quanta;  // [keys]
  unsigned long long* bounds;
  sparse_attention::backward_sm90::HeadConstants* constants;  // [items, 64], 64 heads an item
  float2* sizes;                                              // of the same heads
  float* d_sink;                                              // [rows, heads]
};
ExactSums begin_exact_sums(const SparseAttentionBackward& args, const ExactPlan& plan,
                           Workspace& workspace, cudaStream_t stream);
/// Computes the quanta of a piece and zeros its sums.
void bound_key_sums(const SparseAttentionBackward& piece, const ExactSums& sums,
                    cudaStream_t stream);
/// Adds the sums of a piece to those of all.
void add_exact_sums(const ExactSums& sums, cudaStream_t stream);
/// Rounds the sums to d_kv where they are not in it yet.
void finish_exact_sums(const ExactSums& sums, const Tensor& d_kv, cudaStream_t stream);

}  // namespace winnow::cuda
