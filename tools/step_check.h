// SPDX-License-Identifier: Apache-2.0
// A training step that has run, held against the double-precision reference by samples. Every call
// is judged on the inputs that it had.
#pragma once

#include <cstdint>
#include <vector>

#include "harness/compare.h"
#include "harness/memory.h"
#include "harness/training_step.h"

namespace winnow::tools {

/// What these queries got: windows and lists (of all queries), selection, outputs, gradients.
std::vector<harness::Report> check_rows(const harness::TrainingStep& step,
                                        const harness::Rows& rows);

/// Sums over all queries: the gradients of these keys, of the sinks, of one head's projection.
std::vector<harness::Report> check_sums(const harness::TrainingStep& step,
                                        const harness::Rows& keys, std::int64_t head);

}  // namespace winnow::tools
