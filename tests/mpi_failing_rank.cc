// SPDX-License-Identifier: Apache-2.0
// One rank of an MPI job that fails in the middle of collectives. mpi_test starts it.
//   mpi_failing_rank killed | stopped   what happens to the last rank
#include <chrono>
#include <cstdio>
#include <cstring>
#include <thread>
#include <vector>

#include <fmt/format.h>
#include <mpi.h>
#include <signal.h>

#include "winnow/mpi.h"
#include "winnow/winnow.h"

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  const int signal = std::strcmp(argv[1], "killed") == 0 ? SIGKILL : SIGSTOP;
  MPI_Init(&argc, &argv);
  const MPI_Comm world = MPI_COMM_WORLD;
  const auto ranks = winnow::mpi_communicator(&world, std::chrono::seconds(2));
  std::jthread end;
  if (ranks->rank() == ranks->size() - 1) {
    end = std::jthread([signal] {
      std::this_thread::sleep_for(std::chrono::milliseconds(500));
      raise(signal);
    });
  }

  const std::vector<std::int64_t> rows(static_cast<std::size_t>(ranks->size()), 256);
  std::vector<float> shard(256 * 64);
  std::vector<float> whole(shard.size() * rows.size());
  std::chrono::steady_clock::time_point start;
  try {
    while (true) {
      start = std::chrono::steady_clock::now();
      ranks->all_gather(winnow::tensor(shard.data(), winnow::DType::f32, {256, 64}),
                        winnow::tensor(whole.data(), winnow::DType::f32,
                                       {static_cast<std::int64_t>(whole.size()) / 64, 64}),
                        rows, {});
    }
  } catch (const winnow::Error& error) {
    const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - start;
    fmt::print("after {:.1f} s: {}\n", waited.count(), error.what());
    std::fflush(stdout);
    std::this_thread::sleep_for(std::chrono::seconds(1));  // other ranks print their errors too
    MPI_Abort(MPI_COMM_WORLD, 3);
  }
}
