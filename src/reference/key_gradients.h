// SPDX-License-Identifier: Apache-2.0
// Gradients of keys, to which many query rows add: summed in double, in the order of the query
// rows.
#pragma once

#include <cstdint>
#include <functional>
#include <span>

#include "core/threads.h"
#include "winnow/tensor.h"

namespace winnow::reference {

/// The sums of the keys [begin, end).
struct KeySums {
  std::int64_t begin;
  std::int64_t end;
  std::int64_t dim;
  std::span<double> sums;  // [end - begin, dim]

  bool contain(std::int64_t key) const { return key >= begin && key < end; }
  std::span<double> of(std::int64_t key) const {
    return sums.subspan(static_cast<std::size_t>((key - begin) * dim),
                        static_cast<std::size_t>(dim));
  }
};

/// Scratch of one task of sum_key_gradients, whose own needs are task_bytes.
std::size_t key_gradient_scratch_bytes(const Tensor& d_keys, std::size_t task_bytes,
                                       const Execution& execution);

/// Calls add(sums, scratch) for ranges of keys that together are all rows of d_keys [keys, dim];
/// `add` goes through all query rows and adds what belongs to the range. Then d_keys, if of type
/// `accumulation`, is added to, else overwritten. A key's sum runs over the query rows in their
/// order whatever the ranges are, so threads change no bit of it.
void sum_key_gradients(const Tensor& d_keys, DType accumulation, std::size_t task_bytes,
                       const Execution& execution,
                       const std::function<void(const KeySums&, Scratch)>& add);

}  // namespace winnow::reference
