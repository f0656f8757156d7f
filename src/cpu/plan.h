// SPDX-License-Identifier: Apache-2.0
// Partitioning shared by the ops: the check of the workspace limit, and how many rows a task gets.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>

#include <fmt/format.h>

#include "core/refusals.h"
#include "core/threads.h"
#include "cpu/simd.h"

namespace winnow::cpu {

/// Returns a refusal if a workspace of `bytes` exceeds the caller's limit, else an empty string.
/// The table in backend.cc keeps kAlignment bytes of the limit to align the workspace.
inline std::string over_limit(std::size_t bytes, const Execution& execution) {
  if (bytes > 0) bytes += Scratch::kAlignment;
  if (bytes <= execution.workspace_limit) return {};
  return fmt::format(refusal::over_limit, bytes, execution.workspace_limit);
}

/// Number of rows per task: at most `max_rows`, and such that one lane per thread, each with
/// fixed_bytes plus row_bytes per row, fits into the workspace limit. Every thread gets the same
/// number of tasks, at least four as long as a task keeps at least four rows: the rows of a task
/// share the conversion of a block of keys.
inline std::int64_t rows_per_task(std::int64_t rows, std::int64_t max_rows, std::size_t fixed_bytes,
                                  std::size_t row_bytes, const Execution& execution) {
  constexpr std::int64_t kMinTasks = 4, kMinRows = 4;
  const std::int64_t threads = thread_count(execution);
  const std::size_t lane_bytes = execution.workspace_limit / static_cast<std::size_t>(threads);
  const std::size_t left = lane_bytes - std::min(lane_bytes, fixed_bytes);
  const auto fitting = static_cast<std::int64_t>(left / std::max<std::size_t>(row_bytes, 1));
  max_rows = std::max<std::int64_t>(std::min(max_rows, fitting), 1);
  const std::int64_t tasks_per_thread = std::max(kMinTasks, ceil_div(rows, threads * max_rows));
  const std::int64_t even = ceil_div(rows, threads * tasks_per_thread);
  return std::clamp<std::int64_t>(std::max(even, std::min(kMinRows, ceil_div(rows, threads))), 1,
                                  max_rows);
}

/// Calls each(t) for all rows, with a few thousand rows per task.
template <class Each>
void for_rows(const Execution& execution, std::int64_t rows, const Each& each) {
  constexpr std::int64_t kRows = 4096;
  parallel_for(execution, ceil_div(rows, kRows), 0, [&](std::int64_t i, Scratch) {
    const std::int64_t end = std::min(rows, (i + 1) * kRows);
    for (std::int64_t t = i * kRows; t < end; ++t) each(t);
  });
}

}  // namespace winnow::cpu
