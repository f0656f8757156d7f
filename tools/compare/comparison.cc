// SPDX-License-Identifier: Apache-2.0
// A dumped call on every backend and kernel that takes it.
#include "tools/compare/comparison.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include <fmt/format.h>

#include "harness/backends.h"
#include "tools/spread.h"
#include "winnow/winnow.h"

namespace winnow::dump {
namespace {

using harness::Rows;

constexpr double kOracleSeconds = 5;  // that the reference may take
constexpr std::int64_t kTriedRows = 4;
constexpr std::int64_t kFewestRows = 16;

std::int64_t query_rows_of(const DumpedCall& call) {
  for (const FormatField& field : call.fields) {
    if (!has_query_rows(field)) continue;
    if (const auto output = call.outputs.find(field.name); output != call.outputs.end())
      return output->second.shape[row_axis(field, output->second.shape)];
    if (const harness::Buffer* const input = call.find(field.name)) {
      const Tensor& tensor = input->tensor();
      return tensor.shape[tensor.rank > static_cast<int>(field.dimensions.size()) ? 1 : 0];
    }
  }
  return 0;
}

/// The rows to compare; empty: all.
Rows rows_of(const DumpedCall& call, std::int64_t all, std::int64_t asked) {
  // Integers are quickly made, and offsets of documents count rows without naming them.
  if (is_exact(call.op) || asked >= all || all <= kFewestRows) return {};
  if (asked > 0) return tools::spread(all, asked);
  const auto start = std::chrono::steady_clock::now();
  judge_of(call, tools::spread(all, kTriedRows));
  const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
  const double affordable = kOracleSeconds / std::max(taken.count(), 1e-6) * kTriedRows;
  if (affordable >= static_cast<double>(all)) return {};
  return tools::spread(all, std::max(kFewestRows, static_cast<std::int64_t>(affordable)));
}

bool has_sums(const DumpedCall& call) {
  return std::any_of(call.fields.begin(), call.fields.end(), [&](const FormatField& field) {
    return call.outputs.contains(field.name) && !has_query_rows(field);
  });
}

/// The outputs of the file, as far as they can be compared.
Outputs stored_outputs(const DumpedCall& call, const Rows& rows) {
  Outputs outputs;
  for (const FormatField& field : call.fields) {
    const harness::Buffer* const tensor = call.find(field.name);
    if (tensor == nullptr || !call.outputs.contains(field.name)) continue;
    if (!rows.empty() && !has_query_rows(field)) continue;  // a sum over all rows
    outputs[std::string(field.name)] = values_of_rows(field, *tensor, rows);
  }
  return outputs;
}

Finding failure(const char* what, std::string note) {
  harness::Report report{.what = what};
  report.ok = false;
  report.note = std::move(note);
  return {report, {}, {}};
}

template <class Args>
class Comparer {
 public:
  Comparer(const DumpedCall& call, const ComparisonRequest& request, tools::Progress& progress)
      : call_(call), request_(request), progress_(progress) {}

  Comparison run() {
    progress_.begin("reference in double");
    explain(PlacedTensors(call_, {}).arguments<Args>());  // throws if no backend accepts it
    comparison_.query_rows = query_rows_of(call_);
    rows_ = rows_of(call_, comparison_.query_rows, request_.rows);
    comparison_.compared_rows =
        rows_.empty() ? comparison_.query_rows : static_cast<std::int64_t>(rows_.size());
    judge_ = judge_of(call_, rows_);
    for (const Backend backend : request_.backends) try_backend(backend);
    const Outputs stored = stored_outputs(call_, rows_);
    if (!stored.empty()) comparison_.contenders.push_back({"", "", "", judge_(stored)});
    return std::move(comparison_);
  }

 private:
  void try_backend(Backend backend) {
    const std::string backend_name(name(backend));
    progress_.begin(backend_name);
    if (const std::string reason = why_not(backend); !reason.empty()) {
      comparison_.contenders.push_back({backend_name, "", reason, {}});
      return;
    }
    // At the size of a job the reference would take hours for all rows.
    const Rows rows = backend == Backend::reference ? rows_ : Rows{};
    const Placement placement{.device = harness::device_of(backend), .rows = rows};
    std::vector<Candidate> candidates;
    try {
      candidates = explain(PlacedTensors(call_, placement).arguments<Args>(), {.backend = backend});
    } catch (const Error& error) {  // a GPU may have too little memory
      comparison_.contenders.push_back({backend_name, "", "", {failure("call", error.what())}});
      return;
    }
    for (const Candidate& candidate : candidates) {
      if (!request_.kernel.empty() && candidate.kernel != request_.kernel) continue;
      Contender contender{backend_name, std::string(candidate.kernel), candidate.why_not, {}};
      if (contender.why_not.empty()) {
        Execution execution{.backend = backend};
        execution.kernel = contender.kernel.c_str();
        contender.findings = findings_of(placement, execution);
      }
      comparison_.contenders.push_back(std::move(contender));
    }
  }

  std::vector<Finding> findings_of(Placement placement, const Execution& execution) {
    try {
      PlacedTensors whole(call_, placement);
      winnow::run(whole.arguments<Args>(), execution);
      bool intact = whole.canaries_intact();
      Outputs outputs = outputs_of(whole, placement.rows.empty() ? rows_ : Rows{});
      if (!rows_.empty() && placement.rows.empty() && has_sums(call_)) {
        placement.rows = rows_;
        PlacedTensors part(call_, placement);
        winnow::run(part.arguments<Args>(), execution);
        intact = intact && part.canaries_intact();
        for (const FormatField& field : call_.fields)
          if (call_.outputs.contains(field.name) && !has_query_rows(field))
            outputs[std::string(field.name)] = values_of(part.find(field.name));
      }
      std::vector<Finding> findings = judge_(outputs);
      if (!intact) findings.push_back(failure("memory", "bytes outside a tensor were overwritten"));
      return findings;
    } catch (const Error& error) {
      return {failure("call", error.what())};
    }
  }

  Outputs outputs_of(const PlacedTensors& tensors, const Rows& rows) const {
    Outputs outputs;
    for (const FormatField& field : call_.fields)
      if (call_.outputs.contains(field.name))
        outputs[std::string(field.name)] = values_of_rows(field, tensors.find(field.name), rows);
    return outputs;
  }

  const DumpedCall& call_;
  const ComparisonRequest& request_;
  tools::Progress& progress_;
  Rows rows_;  // that are compared; empty: all
  Judge judge_;
  Comparison comparison_;
};

}  // namespace

bool Contender::failed() const {
  return std::any_of(findings.begin(), findings.end(),
                     [](const Finding& finding) { return !finding.report.ok; });
}

bool Contender::ran() const { return !backend.empty() && why_not.empty(); }

bool Comparison::ok() const {
  return failed() == 0 && std::any_of(contenders.begin(), contenders.end(),
                                      [](const Contender& each) { return each.ran(); });
}

std::size_t Comparison::failed() const {
  return static_cast<std::size_t>(std::count_if(
      contenders.begin(), contenders.end(), [](const Contender& each) { return each.failed(); }));
}

Comparison compare_call(const DumpedCall& call, const ComparisonRequest& request,
                        tools::Progress& progress) {
  Comparison comparison;
  for_each_operator([&]<class Args>(std::type_identity<Args>) {
    if (call.op == Args::kOperator) comparison = Comparer<Args>(call, request, progress).run();
  });
  return comparison;
}

}  // namespace winnow::dump
