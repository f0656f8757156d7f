// SPDX-License-Identifier: Apache-2.0
#include "tools/mpi_job.h"

#include <cstdlib>
#include <thread>

#include <mpi.h>

#include "winnow/mpi.h"

namespace winnow::tools {
namespace {

const MPI_Comm kWorld = MPI_COMM_WORLD;

void finish(MPI_Request request) {
  for (int done = 0; true;) {
    MPI_Test(&request, &done, MPI_STATUS_IGNORE);
    if (done != 0) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

}  // namespace

MpiJob::MpiJob() {
  MPI_Init(nullptr, nullptr);
  MPI_Comm_rank(kWorld, &rank_);
  MPI_Comm_size(kWorld, &size_);
}

MpiJob::~MpiJob() { MPI_Finalize(); }

std::unique_ptr<Communicator> MpiJob::communicator(std::chrono::milliseconds timeout) const {
  return mpi_communicator(&kWorld, timeout);
}

std::vector<double> MpiJob::collect(std::span<const double> values) const {
  const auto own = static_cast<int>(values.size());
  std::vector<int> counts(static_cast<std::size_t>(size_));
  MPI_Request request = MPI_REQUEST_NULL;
  MPI_Igather(&own, 1, MPI_INT, counts.data(), 1, MPI_INT, 0, kWorld, &request);
  finish(request);
  std::vector<int> places;
  std::size_t total = 0;
  for (const int count : counts) {
    places.push_back(static_cast<int>(total));
    total += static_cast<std::size_t>(count);
  }
  std::vector<double> all(rank_ == 0 ? total : 0);
  MPI_Igatherv(values.data(), own, MPI_DOUBLE, all.data(), counts.data(), places.data(), MPI_DOUBLE,
               0, kWorld, &request);
  finish(request);
  return all;
}

bool MpiJob::decided_by_rank_0(bool decision) const {
  int word = decision ? 1 : 0;
  MPI_Request request = MPI_REQUEST_NULL;
  MPI_Ibcast(&word, 1, MPI_INT, 0, kWorld, &request);
  finish(request);
  return word != 0;
}

void MpiJob::abort(int exit_code) const {
  MPI_Abort(kWorld, exit_code);
  std::abort();  // MPI_Abort does not return
}

}  // namespace winnow::tools
