// SPDX-License-Identifier: Apache-2.0
// Descriptions of tensors for the copy engine of Hopper (TMA).
#pragma once

#include <array>
#include <cstdint>

#include <cuda.h>

#include "winnow/tensor.h"

namespace winnow::cuda {

/// Whether the copy engine can read a tensor: 16-byte aligned rows, no stride that is negative,
/// zero or huge, and elements at all.
bool can_have_tensor_map(const Tensor& tensor);

/// For copies of boxes of `box[i]` elements along dimension i into rows of 128 bytes with the
/// 128-byte swizzle; those along the last of up to four dimensions fill such a row. What lies
/// outside of the tensor is zeros.
CUtensorMap make_tensor_map(const Tensor& tensor, const std::array<std::uint32_t, 4>& box);

}  // namespace winnow::cuda
