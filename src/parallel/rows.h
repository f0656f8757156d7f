// SPDX-License-Identifier: Apache-2.0
// Rows between the order of ranks (the shards one after another) and the global order.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "winnow/execution.h"
#include "winnow/tensor.h"

namespace winnow::parallel {

/// Rows that stand together on both sides. A list of runs is sorted by `first`, and a run ends
/// where the next one begins.
struct Run {
  std::int64_t first;  // rows of the runs before
  std::int64_t from;   // its first row where it comes from
  std::int64_t to;     // and where it goes
};

/// to[run.to + i] = from[run.from + i], `rows` rows in all. Both are [.., width] with contiguous
/// rows; of one type, or f32 that is rounded once to bf16 or f16. In the order of the stream on a
/// CUDA device.
void copy_rows(const Tensor& from, const Tensor& to, std::span<const Run> runs, std::int64_t rows,
               const Execution& execution);

/// The run that row i belongs to.
const Run& run_of(std::span<const Run> runs, std::int64_t i);

}  // namespace winnow::parallel
