// SPDX-License-Identifier: Apache-2.0
// run_on_ranks: a training step over the ranks of an MPI job, checked against one rank.
#pragma once

#include <cstdint>

#include "harness/cases.h"
#include "winnow/winnow.h"

namespace winnow::tools {

struct RankRun {
  harness::Case c;      // all of its rows are queries
  Execution execution;  // the threads of a rank are its share of the machine's
  Sharding sharding = Sharding::zigzag;
  std::uint64_t seed = 1;
  bool json = false;
};

/// Called by every rank; rank 0 prints. The exit code of the program. An error of one rank ends the
/// job.
int run_on_ranks(const RankRun& request);

}  // namespace winnow::tools
