// SPDX-License-Identifier: Apache-2.0
// The kernels of sparse_attention; kernels.cc puts them in order.
#pragma once

#include "backend_operators.h"

namespace winnow::cuda {

// Forward: Hopper's own instructions for the widths of the models, with up to 16 heads and with any
// number; tensor cores for rows of up to 256 elements, and for any shape in bf16 and f16; fp32
// arithmetic for f32.
extern const Kernel<SparseAttentionForward> forward_few_heads;
extern const Kernel<SparseAttentionForward> forward_sm90;
extern const Kernel<SparseAttentionForward> forward_narrow;
extern const Kernel<SparseAttentionForward> forward_general;
extern const Kernel<SparseAttentionForward> forward_f32;

// Backward: Hopper's own instructions likewise; any shape and type.
extern const Kernel<SparseAttentionBackward> backward_sm90;
extern const Kernel<SparseAttentionBackward> backward_general;

}  // namespace winnow::cuda
