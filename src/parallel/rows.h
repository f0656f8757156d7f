// SPDX-License-Identifier: Apache-2.0
// Permutes rows between rank order (one shard after another) and global order.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "winnow/execution.h"
#include "winnow/tensor.h"

namespace winnow::parallel {

/// Rows that are consecutive in source and destination. A list of runs is sorted by `first`, and a
/// run ends where the next one begins.
struct Run {
  std::int64_t first;  // number of rows in the runs before it
  std::int64_t from;   // its first row in the source
  std::int64_t to;     // its first row in the destination
};

/// to[run.to + i] = from[run.from + i] for every run, `rows` rows in all. Both tensors are
/// [.., width] with contiguous rows, and of one type, or f32 is rounded once to bf16 or f16. On a
/// CUDA device the copy is enqueued on the stream.
void copy_rows(const Tensor& from, const Tensor& to, std::span<const Run> runs, std::int64_t rows,
               const Execution& execution);

/// The run that contains row i.
const Run& run_of(std::span<const Run> runs, std::int64_t i);

}  // namespace winnow::parallel
