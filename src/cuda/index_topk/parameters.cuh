// SPDX-License-Identifier: Apache-2.0
// The parameters of the kernels of index_topk, beside the plan: tensors with their shapes, strides
// in elements.
#pragma once

#include <cstdint>

#include "cuda/common/runtime.h"
#include "cuda/index_topk/plan.cuh"
#include "winnow/index_topk.h"

namespace winnow::cuda::index_topk {

/// The inputs of the kernels that compute scores.
struct ScoreInputs {
  const void* q;         // [tokens, heads, dim]
  const void* k;         // [keys, dim]
  const float* weights;  // [tokens, heads]
  const float* k_scale;  // [keys], or null
  std::int64_t q_token_stride, q_head_stride, k_stride, weights_stride;
  int heads, dim;
  bool q_aligned, k_aligned;  // rows at 16-byte boundaries
};

inline ScoreInputs score_inputs(const IndexTopkForward& args) {
  return {.q = args.q.data,
          .k = args.k.data,
          .weights = data_of<const float>(args.weights),
          .k_scale = data_of<const float>(args.k_scale),
          .q_token_stride = args.q.stride[0],
          .q_head_stride = args.q.stride[1],
          .k_stride = args.k.stride[0],
          .weights_stride = args.weights.stride[0],
          .heads = static_cast<int>(args.q.shape[1]),
          .dim = static_cast<int>(args.q.shape[2]),
          .q_aligned = has_aligned_rows(args.q),
          .k_aligned = has_aligned_rows(args.k)};
}

/// Where the selection goes.
struct SelectOutputs {
  std::int32_t* indices;  // [tokens, topk]
  std::int32_t* lengths;  // [tokens], or null
  float* scores;          // [tokens, topk], or null
  float* scratch;         // [blocks, topk]: scores to sort by where there is no output for them
  std::int64_t indices_stride, scores_stride;
  int topk;
  bool by_score;
};

/// Where rows that get their whole window are written.
struct WindowOutputs {
  std::int32_t* indices;  // [tokens, topk]
  std::int32_t* lengths;  // [tokens], or null
  std::uint8_t* done;     // [tokens]
  std::int64_t indices_stride;
  int topk;
};

/// The given keys of replay, and their scores.
struct ReplayParameters {
  const std::int32_t* indices;  // [tokens, topk]
  const std::int32_t* lengths;  // [tokens], or null
  const std::int32_t* begin;    // [tokens]
  const std::int32_t* end;      // [tokens]
  float* scores;                // [tokens, topk]
  std::int64_t indices_stride, scores_stride;
  std::int64_t tokens, parts;  // of each row's slots
  int topk, keys;
};

}  // namespace winnow::cuda::index_topk
