// SPDX-License-Identifier: Apache-2.0
// Stub for the communicator over MPI in a build without MPI.
#include <fmt/format.h>

#include "core/memory_errors.h"
#include "core/refusals.h"
#include "winnow/error.h"
#include "winnow/parallel.h"

namespace winnow {

std::unique_ptr<Communicator> mpi_communicator(const void*, std::chrono::milliseconds) {
  return with_memory_errors("mpi_communicator", [&]() -> std::unique_ptr<Communicator> {
    throw Error(ErrorCode::unsupported,
                fmt::format(refusal::part_not_built, "mpi_communicator", "MPI"));
  });
}

}  // namespace winnow
