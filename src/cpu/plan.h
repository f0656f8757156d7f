// SPDX-License-Identifier: Apache-2.0
// How much an op takes at once: refusals by the workspace limit, rows to a task.
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

/// Empty if `least` bytes are within the caller's limit, of which the table keeps kAlignment bytes
/// back.
inline std::string over_limit(std::size_t least, const Execution& execution) {
  if (least > 0) least += Scratch::kAlignment;
  if (least <= execution.workspace_limit) return {};
  return fmt::format(refusal::over_limit, least, execution.workspace_limit);
}

/// Rows of a task: at most `most`, and so many that all lanes, each with fixed_bytes and row_bytes
/// a row, fit into the limit. Tasks come in equal numbers for every thread, at least four where
/// that leaves each at least four rows, which share what is made of a block of keys.
inline std::int64_t rows_per_task(std::int64_t rows, std::int64_t most, std::size_t fixed_bytes,
                                  std::size_t row_bytes, const Execution& execution) {
  constexpr std::int64_t kTasks = 4, kRows = 4;
  const std::int64_t threads = thread_count(execution);
  const std::size_t lane_bytes = execution.workspace_limit / static_cast<std::size_t>(threads);
  const std::size_t left = lane_bytes - std::min(lane_bytes, fixed_bytes);
  const auto fitting = static_cast<std::int64_t>(left / std::max<std::size_t>(row_bytes, 1));
  most = std::max<std::int64_t>(std::min(most, fitting), 1);
  const std::int64_t rounds = std::max(kTasks, ceil_div(rows, threads * most));
  const std::int64_t even = ceil_div(rows, threads * rounds);
  return std::clamp<std::int64_t>(std::max(even, std::min(kRows, ceil_div(rows, threads))), 1,
                                  most);
}

/// Calls each(t) for all rows, some thousand to a task.
template <class Each>
void for_rows(const Execution& execution, std::int64_t rows, const Each& each) {
  constexpr std::int64_t kRows = 4096;
  parallel_for(execution, ceil_div(rows, kRows), 0, [&](std::int64_t i, Scratch) {
    const std::int64_t end = std::min(rows, (i + 1) * kRows);
    for (std::int64_t t = i * kRows; t < end; ++t) each(t);
  });
}

}  // namespace winnow::cpu
