// SPDX-License-Identifier: Apache-2.0
// Stands in for MpiJob in a build without MPI.
#include <cstdlib>

#include "tools/mpi_job.h"
#include "winnow/error.h"

namespace winnow::tools {

MpiJob::MpiJob() {
  throw Error(ErrorCode::unsupported, "--context-parallel needs MPI, which is not in this build");
}
MpiJob::~MpiJob() = default;
std::unique_ptr<Communicator> MpiJob::communicator(std::chrono::milliseconds) const { return {}; }
std::vector<double> MpiJob::collect(std::span<const double>) const { return {}; }
bool MpiJob::decided_by_rank_0(bool decision) const { return decision; }
void MpiJob::abort(int exit_code) const { std::exit(exit_code); }

}  // namespace winnow::tools
