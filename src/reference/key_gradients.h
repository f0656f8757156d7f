// SPDX-License-Identifier: Apache-2.0
// Gradients of keys, to which many query rows contribute: accumulated in double, in the order of
// the query rows.
#pragma once

#include <cstdint>
#include <functional>
#include <span>

#include "core/threads.h"
#include "winnow/tensor.h"

namespace winnow::reference {

/// Accumulators of the gradients of keys [begin, end).
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

/// Scratch bytes of one task of sum_key_gradients, in which `add` itself takes task_bytes.
std::size_t key_gradient_scratch_bytes(const Tensor& d_keys, std::size_t task_bytes,
                                       const Execution& execution);

/// Splits the rows of d_keys [keys, dim] into ranges and calls add(sums, scratch) for each; `add`
/// goes through all query rows and accumulates the gradients of the keys in its range. The result
/// is added to a d_keys of type `accumulation` and overwrites one of another type. Each key is
/// summed in the order of the query rows whatever the ranges are, so the number of threads changes
/// no bit.
void sum_key_gradients(const Tensor& d_keys, DType accumulation, std::size_t task_bytes,
                       const Execution& execution,
                       const std::function<void(const KeySums&, Scratch)>& add);

}  // namespace winnow::reference
