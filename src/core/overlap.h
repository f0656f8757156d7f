// SPDX-License-Identifier: Apache-2.0
// Hull: the addresses of a tensor, cheap to compare; share_memory: whether two tensors have a byte
// in common.
#pragma once

#include <cstdint>

#include "winnow/tensor.h"

namespace winnow {

/// The bytes from the first element of a tensor to the end of its last one.
struct Hull {
  std::uintptr_t begin = 0;
  std::uint64_t bytes = 0;
};

/// Of an absent or empty tensor the hull has no bytes. Strides are not negative and the hull ends
/// within 64 bits, as Check requires.
Hull hull_of(const Tensor& tensor);

/// Differences of addresses wrap around, so that the ends need not be computed.
inline bool meet(const Hull& a, const Hull& b) {
  if (a.bytes == 0 || b.bytes == 0) return false;
  return b.begin - a.begin < a.bytes || a.begin - b.begin < b.bytes;
}

/// Whether two tensors on the same device have a byte in common. Views that interleave, such as two
/// column slices of one buffer, do not. The comparison takes a bounded number of steps, which
/// suffices for all tensors with equal strides and for a contiguous tensor beside any other;
/// tensors of many rows and different strides that were not found to meet by then count as apart.
bool share_memory(const Tensor& a, const Tensor& b);

}  // namespace winnow
