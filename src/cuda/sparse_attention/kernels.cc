// SPDX-License-Identifier: Apache-2.0
// The kernels of sparse_attention, best first.
#include "cuda/sparse_attention/kernels.h"

#include <array>

namespace winnow::cuda {

Kernels<SparseAttentionForward> kernels(std::type_identity<SparseAttentionForward>) {
  static const std::array kKernels = {forward_few_heads, forward_sm90, forward_narrow,
                                      forward_general, forward_f32};
  return kKernels;
}

Kernels<SparseAttentionBackward> kernels(std::type_identity<SparseAttentionBackward>) {
  static const std::array kKernels = {backward_sm90, backward_general};
  return kKernels;
}

}  // namespace winnow::cuda
