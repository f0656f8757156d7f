// SPDX-License-Identifier: Apache-2.0
// The kernels of value_projection with Hopper's own instructions; value_projection.cu lists all.
#pragma once

#include "backend_operators.h"

namespace winnow::cuda::value_projection {

extern const Kernel<ValueProjectionForward> forward_sm90;
extern const Kernel<ValueProjectionBackward> backward_sm90;

}  // namespace winnow::cuda::value_projection
