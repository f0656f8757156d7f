// SPDX-License-Identifier: Apache-2.0
// MpiJob: MPI for the time of a command. A build without MPI gets one that throws
// Error(unsupported).
#pragma once

#include <chrono>
#include <memory>
#include <span>
#include <vector>

#include "winnow/parallel.h"

namespace winnow::tools {

class MpiJob {
 public:
  MpiJob();
  ~MpiJob();
  MpiJob(const MpiJob&) = delete;
  MpiJob& operator=(const MpiJob&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  /// A communicator of all ranks.
  std::unique_ptr<Communicator> communicator(std::chrono::milliseconds timeout) const;

  /// The values of all ranks, one after another, on rank 0; nothing on others. A rank that waits
  /// leaves its core to others.
  std::vector<double> collect(std::span<const double> values) const;
  /// Whether rank 0 says so.
  bool decided_by_rank_0(bool decision) const;
  /// Ends all ranks at once, also those that wait for this one.
  [[noreturn]] void abort(int exit_code) const;

 private:
  int rank_ = 0;
  int size_ = 1;
};

}  // namespace winnow::tools
