// SPDX-License-Identifier: Apache-2.0
// Trial: one check in progress.
#include "harness/trial.h"

#include <cmath>

#include "harness/backends.h"
#include "harness/inputs.h"

namespace winnow::harness {

Trial::Trial(const Case& c, const Execution& execution, std::uint64_t seed, std::int64_t sample)
    : execution_(execution), rows_(sampled_rows(c, seed, sample)) {
  tested_.device = device_of(execution.backend);
  oracle_.as_f64 = true;
  if (!c.full && !c.slow) return;
  oracle_.rows = rows_;
  tested_.live_rows = rows_;
  // At a model's own size the reference would take hours for all rows.
  if (c.full && execution.backend == Backend::reference)
    tested_.rows = rows_;
  else
    at_ = rows_;
}

std::vector<double> Trial::compared(const Buffer& buffer) const {
  return at_.empty() ? buffer.download() : buffer.download(at_);
}

std::vector<std::int32_t> Trial::compared_ints(const Buffer& buffer) const {
  return at_.empty() ? buffer.download_ints() : buffer.download_ints(at_);
}

void Trial::upload(std::span<const double> values, Buffer& buffer) const {
  return at_.empty() ? buffer.upload(values) : buffer.upload(values, at_);
}

void Trial::check_canaries(const Buffers& buffers) {
  if (buffers.canaries_intact()) return;
  Report report;
  report.what = "memory";
  report.ok = false;
  report.note = "bytes outside a tensor were overwritten";
  reports_.push_back(std::move(report));
}

std::vector<double> difference(std::span<const double> after, std::span<const double> before) {
  std::vector<double> result(after.begin(), after.end());
  for (std::size_t i = 0; i < result.size(); ++i) result[i] -= before[i];
  return result;
}

std::vector<double> magnitudes(std::span<const double> values) {
  std::vector<double> result(values.begin(), values.end());
  for (double& value : result) value = std::abs(value);
  return result;
}

}  // namespace winnow::harness
