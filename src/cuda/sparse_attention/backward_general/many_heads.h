// SPDX-License-Identifier: Apache-2.0
// The general backward's kernels for 64 heads of a query in tiles of 32 keys.
#pragma once

#include <cstddef>

#include "cuda/sparse_attention/parameters.cuh"

namespace winnow::cuda::sparse_attention::backward_general {

struct ManyHeads {
  void (*kernel)(BackwardParameters) = nullptr;  // null: too little shared memory, or other widths
  int heads = 64;
  int keys = 32;
  int stages = 2;
  int threads = 0;
  std::size_t shared_bytes = 0;
};

/// For bf16 and f16; `limit`: bytes of shared memory of a block.
template <class T>
ManyHeads many_heads(int qk_dim, int v_dim, std::size_t limit);

}  // namespace winnow::cuda::sparse_attention::backward_general
