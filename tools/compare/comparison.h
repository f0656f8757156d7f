// SPDX-License-Identifier: Apache-2.0
// compare_call: a dumped call on every backend and kernel that takes it, against the reference.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tools/compare/judge.h"
#include "tools/progress.h"
#include "winnow/execution.h"

namespace winnow::dump {

/// A kernel that was tried, or the outputs that the file holds.
struct Contender {
  std::string backend;  // empty: the file
  std::string kernel;   // empty: the reason holds for the whole backend
  std::string why_not;  // not empty: it did not run
  std::vector<Finding> findings;

  bool failed() const;
  bool ran() const;  // a kernel, not the file
};

struct Comparison {
  std::int64_t query_rows = 0;
  std::int64_t compared_rows = 0;
  std::vector<Contender> contenders;

  std::size_t failed() const;
  bool ok() const;  // a kernel ran, and nothing failed
};

struct ComparisonRequest {
  std::vector<Backend> backends;
  std::string kernel;     // empty: all
  std::int64_t rows = 0;  // 0: as many as the reference does in some seconds
};

/// Kernels run the whole call, and query rows that are evenly spread are compared; sums over rows
/// come from a second run on those rows alone. The reference runs them alone. Throws Error for a
/// call that no backend accepts. `progress` counts one part and one for each backend.
Comparison compare_call(const DumpedCall& call, const ComparisonRequest& request,
                        tools::Progress& progress);

}  // namespace winnow::dump
