// SPDX-License-Identifier: Apache-2.0
// Which kernel a call takes, where calls of several operators share one Execution.
#pragma once

#include <algorithm>
#include <string_view>
#include <vector>

#include "winnow/call.h"

namespace winnow::harness {

/// The Execution for a call of this operator. A kernel asked for by name applies to the operators
/// that have it on the backend; others choose by themselves.
template <Arguments Args>
Execution for_operator(Execution execution) {
  if (execution.kernel == nullptr) return execution;
  const std::vector<std::string_view> names = kernels<Args>(execution.backend);
  if (std::find(names.begin(), names.end(), execution.kernel) == names.end())
    execution.kernel = nullptr;
  return execution;
}

/// The candidate that runs, of those that explain gives; null if none can.
inline const Candidate* chosen(const std::vector<Candidate>& candidates) {
  const auto found =
      std::find_if(candidates.begin(), candidates.end(),
                   [](const Candidate& candidate) { return candidate.why_not.empty(); });
  return found == candidates.end() ? nullptr : &*found;
}

/// The name of the kernel that runs the call; empty if none can.
template <Arguments Args>
std::string_view kernel_of(const Args& args, const Execution& execution) {
  const std::vector<Candidate> candidates = explain(args, for_operator<Args>(execution));
  const Candidate* const candidate = chosen(candidates);
  return candidate == nullptr ? std::string_view() : candidate->kernel;
}

}  // namespace winnow::harness
