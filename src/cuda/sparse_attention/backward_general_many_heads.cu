// SPDX-License-Identifier: Apache-2.0
// Sparse attention, backward, for more than 32 heads of wide rows: 64 heads of a query in tiles of
// 32 keys. Two groups of 32 heads would gather every key twice and add to its gradient twice.
#include "cuda/sparse_attention/backward_general/many_heads.cuh"
#include "cuda/sparse_attention/backward_general/many_heads.h"
#include "cuda/sparse_attention/backward_general/tile.cuh"

namespace winnow::cuda::sparse_attention::backward_general {

template <class T>
ManyHeads many_heads(int qk_dim, int v_dim, std::size_t limit) {
  constexpr int kPairs = 5;  // registers suffice for no more
  ManyHeads choice;
  if (qk_dim <= 256 || qk_dim > kPairs * 8 * 16) return choice;
  const int elements = choice.heads * (row_elements<T>(qk_dim) + v_row_elements<T>(v_dim)) +
                       choice.stages * choice.keys * row_elements<T>(qk_dim);
  const std::size_t bytes = static_cast<std::size_t>(elements) * sizeof(T);
  using Split = ManyHeadsGradient<T>;
  if (qk_dim <= Split::kMaxDim && sizeof(typename Split::Storage) + bytes <= limit) {
    choice.kernel = sparse_attention_backward_many_heads_kernel<T>;
    choice.threads = Split::kThreadCount;
    choice.shared_bytes = sizeof(typename Split::Storage) + bytes;
  } else if (qk_dim > 512 && sizeof(SharedStorage<T, 64, 32>) + bytes <= limit) {
    choice.kernel = sparse_attention_backward_general_kernel<T, 64, kPairs, 32>;
    choice.threads = kThreads<64>;
    choice.shared_bytes = sizeof(SharedStorage<T, 64, 32>) + bytes;
  }
  return choice;
}

template ManyHeads many_heads<__nv_bfloat16>(int, int, std::size_t);
template ManyHeads many_heads<__half>(int, int, std::size_t);

}  // namespace winnow::cuda::sparse_attention::backward_general
