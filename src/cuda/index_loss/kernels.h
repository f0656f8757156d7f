// SPDX-License-Identifier: Apache-2.0
// The kernels of index_target that have files of their own; index_target.cu puts them in order.
#pragma once

#include "backend_operators.h"

namespace winnow::cuda {

/// Hopper's own instructions for the widths of the models.
extern const Kernel<IndexTarget> index_target_sm90;

}  // namespace winnow::cuda
