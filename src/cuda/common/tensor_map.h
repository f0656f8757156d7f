// SPDX-License-Identifier: Apache-2.0
// Tensor maps: descriptions of tensors for TMA, Hopper's tensor memory accelerator.
#pragma once

#include <array>
#include <cstdint>

#include <cuda.h>

#include "winnow/tensor.h"

namespace winnow::cuda {

/// Whether TMA can read a tensor: its rows are 16-byte aligned, no stride is negative, zero or
/// huge, and it has elements.
bool can_have_tensor_map(const Tensor& tensor);

/// A map for copies of boxes of `box[i]` elements along dimension i. In shared memory the elements
/// along the last of up to four dimensions fill a row of 128 bytes, with the 128-byte swizzle.
/// Elements outside of the tensor are zeros.
CUtensorMap make_tensor_map(const Tensor& tensor, const std::array<std::uint32_t, 4>& box);

}  // namespace winnow::cuda
