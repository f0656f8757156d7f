// SPDX-License-Identifier: Apache-2.0
#include "reference/key_gradients.h"

#include <algorithm>

#include "core/rows.h"

namespace winnow::reference {
namespace {

/// Makes ranges as large as the workspace limit and the number of threads allow: every range costs
/// a pass over all query rows, so few are better.
std::int64_t keys_per_range(const Tensor& d_keys, std::size_t task_bytes,
                            const Execution& execution) {
  const std::int64_t keys = d_keys.shape[0];
  const std::int64_t threads = thread_count(execution);
  const auto row_bytes = static_cast<std::int64_t>(sizeof(double)) * d_keys.shape[1];
  const auto lane_bytes =
      static_cast<std::int64_t>(execution.workspace_limit / static_cast<std::size_t>(threads));
  const std::int64_t fitting = (lane_bytes - static_cast<std::int64_t>(task_bytes)) / row_bytes - 1;
  return std::clamp<std::int64_t>((keys + threads - 1) / threads, 1,
                                  std::max<std::int64_t>(fitting, 1));
}

}  // namespace

std::size_t key_gradient_scratch_bytes(const Tensor& d_keys, std::size_t task_bytes,
                                       const Execution& execution) {
  const std::int64_t range = keys_per_range(d_keys, task_bytes, execution);
  return task_bytes + Scratch::bytes<double>(range * d_keys.shape[1]) +
         Scratch::bytes<double>(d_keys.shape[1]);
}

void sum_key_gradients(const Tensor& d_keys, DType accumulation, std::size_t task_bytes,
                       const Execution& execution,
                       const std::function<void(const KeySums&, Scratch)>& add) {
  const std::int64_t keys = d_keys.shape[0];
  const std::int64_t dim = d_keys.shape[1];
  const std::int64_t range = keys_per_range(d_keys, task_bytes, execution);
  parallel_for(execution, (keys + range - 1) / range,
               key_gradient_scratch_bytes(d_keys, task_bytes, execution),
               [&](std::int64_t i, Scratch scratch) {
                 const std::int64_t begin = i * range;
                 const std::int64_t end = std::min(begin + range, keys);
                 const std::span<double> previous = scratch.take<double>(dim);
                 const KeySums sums{begin, end, dim, scratch.take<double>((end - begin) * dim)};
                 std::fill(sums.sums.begin(), sums.sums.end(), 0.0);
                 add(sums, scratch);
                 for (std::int64_t key = begin; key < end; ++key) {
                   const std::span<double> sum = sums.of(key);
                   if (d_keys.dtype == accumulation) {
                     read_row(d_keys, {key}, previous);
                     for (std::int64_t d = 0; d < dim; ++d) sum[d] += previous[d];
                   }
                   write_row(d_keys, {key}, sum);
                 }
               });
}

}  // namespace winnow::reference
