// SPDX-License-Identifier: Apache-2.0
// What the kernels that make scores are given.
#pragma once

#include <cstdint>

#include "cuda/common/runtime.h"
#include "cuda/index_topk/plan.cuh"
#include "winnow/index_topk.h"

namespace winnow::cuda::index_topk {

struct ScoreInputs {
  const void* q;         // [tokens, heads, dim]
  const void* k;         // [keys, dim]
  const float* weights;  // [tokens, heads]
  const float* k_scale;  // [keys], or null
  std::int64_t q_row, q_head, k_row, weights_row;
  int heads, dim;
};

inline ScoreInputs score_inputs(const IndexTopkForward& args) {
  return {.q = args.q.data,
          .k = args.k.data,
          .weights = data_of<const float>(args.weights),
          .k_scale = data_of<const float>(args.k_scale),
          .q_row = args.q.stride[0],
          .q_head = args.q.stride[1],
          .k_row = args.k.stride[0],
          .weights_row = args.weights.stride[0],
          .heads = static_cast<int>(args.q.shape[1]),
          .dim = static_cast<int>(args.q.shape[2])};
}

}  // namespace winnow::cuda::index_topk
