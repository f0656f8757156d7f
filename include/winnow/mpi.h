// SPDX-License-Identifier: Apache-2.0
// The communicator over MPI, in a library of its own: winnow::mpi, libwinnow_mpi.so. winnow.h does
// not include this header.
#pragma once

#include <chrono>
#include <memory>

#include "winnow/parallel.h"

namespace winnow {

/// A communicator over MPI. `comm` points to an MPI_Comm of the caller, which is duplicated, so all
/// ranks must call this together. CUDA tensors are copied through host memory. The time-out applies
/// to each collective. After a time-out MPI_Finalize would wait for the missing rank, so end the
/// job with MPI_Abort.
std::unique_ptr<Communicator> mpi_communicator(
    const void* comm, std::chrono::milliseconds timeout = kCommunicationTimeout);

}  // namespace winnow
