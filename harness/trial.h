// SPDX-License-Identifier: Apache-2.0
// Trial: one check in progress.
#pragma once

#include <span>
#include <string>
#include <utility>
#include <vector>

#include "harness/buffers.h"
#include "harness/compare.h"
#include "harness/kernel_choice.h"

namespace winnow::harness {

/// The oracle computes in double on the CPU.
inline constexpr Execution kOracle{.backend = Backend::reference};

/// Places the tested workload and the oracle, runs calls and collects reports. Where a case is full
/// or slow only a sample of its rows is compared: the oracle holds those alone, and in the tested
/// workload they alone have an incoming gradient, so that sums over rows agree. Rows do not depend
/// on each other, which is what makes this enough.
class Trial {
 public:
  Trial(const Case& c, const Execution& execution, std::uint64_t seed, std::int64_t sample = 16);

  const Placement& tested() const { return tested_; }
  const Placement& oracle() const { return oracle_; }
  /// Rows of the case that are compared.
  const Rows& rows() const { return rows_; }

  /// The compared rows of a query tensor of the tested workload.
  std::vector<double> compared(const Buffer& buffer) const;
  std::vector<std::int32_t> compared_ints(const Buffer& buffer) const;
  /// Writes values for those rows.
  void upload(std::span<const double> values, Buffer& buffer) const;

  /// Runs a call of the tested workload; false, with a report, if the backend cannot.
  template <class Args>
  bool run(std::string what, const Args& args, bool deterministic = false) {
    Execution execution = for_operator<Args>(execution_);
    execution.deterministic = execution.deterministic || deterministic;
    std::string reason = why_not(args, execution);
    if (reason.empty()) {
      winnow::run(args, execution);
      kernel_ = kernel_of(args, execution);
      return true;
    }
    Report report;
    report.what = std::move(what);
    report.skipped = true;
    report.note = std::move(reason);
    add(std::move(report));
    return false;
  }

  /// Adds what was found out about the last call.
  void add(Report report) {
    if (!report.skipped) report.kernel = kernel_;
    reports_.push_back(std::move(report));
  }
  void check_canaries(const Buffers& buffers);
  std::vector<Report> reports() const { return reports_; }

 private:
  Execution execution_;
  Rows rows_;
  Rows at_;  // where the compared rows stand in the tested workload; empty: everywhere
  Placement tested_;
  Placement oracle_;
  std::string kernel_;  // of the last call
  std::vector<Report> reports_;
};

std::vector<double> difference(std::span<const double> after, std::span<const double> before);
std::vector<double> magnitudes(std::span<const double> values);

}  // namespace winnow::harness
