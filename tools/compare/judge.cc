// SPDX-License-Identifier: Apache-2.0
// The outputs of a dumped call against the reference in double.
#include "tools/compare/judge.h"

#include <cmath>
#include <limits>
#include <memory>

#include <fmt/format.h>

#include "harness/trial.h"
#include "harness/value_magnitudes.h"
#include "tools/compare/gradient_norms.h"
#include "tools/compare/judge_selection.h"
#include "tools/compare/locate.h"

namespace winnow::dump {
namespace {

using harness::kOracle;
using harness::Limit;

/// What an output should be, how far it may be off and in which units.
struct Expected {
  const FormatField* field = nullptr;
  harness::Shape shape;  // of the compared rows
  std::vector<double> values;
  std::vector<double> units;  // empty: the largest of the values
  Limit limit{0, true, true};
  double norm = 0;  // by which a gradient is judged; 0: its own
};

/// That of the inputs.
DType dtype_of(const DumpedCall& call) {
  for (const FormatField& field : call.fields)
    if (const harness::Buffer* const tensor = call.find(field.name);
        tensor != nullptr && tensor->tensor().dtype != DType::i32)
      return tensor->tensor().dtype;
  return DType::f32;
}

Limit limit_of(std::string_view op, std::string_view output, DType dtype) {
  if (is_exact(op)) return {0, true, true};
  if (output == "out" || output == "out_v") return harness::output_limit(dtype);
  if (output == "lse" || output == "max_logits") return harness::lse_limit(dtype);
  if (output == "target") return harness::target_limit(dtype);
  if (output == "loss") return harness::loss_limit(dtype);
  if (output == "scores") return harness::score_limit(dtype);
  if (output == "d_scores") return harness::loss_gradient_limit();
  return harness::gradient_limit(dtype);
}

/// What one unit is for an output whose elements have units of their own.
template <class Args>
std::vector<double> units_of(PlacedTensors& oracle, std::string_view output,
                             const std::vector<double>& values, DType dtype) {
  if (output == "lse" || output == "max_logits" || output == "loss")
    return harness::at_least_one(values);
  if constexpr (std::is_same_v<Args, SparseAttentionForward>)
    if (output == "out")
      return harness::output_units(dtype, values,
                                   harness::value_magnitudes(oracle.arguments<Args>()));
  if constexpr (std::is_same_v<Args, ValueProjectionForward>)
    if (output == "out_v") {
      for (const char* const name : {"out", "w_v"}) {
        const Tensor tensor = oracle.find(name).tensor();
        oracle.put(name, DType::f64, {tensor.shape.begin(), tensor.shape.begin() + tensor.rank},
                   harness::magnitudes(oracle.find(name).download()));
      }
      run(oracle.arguments<Args>(), kOracle);
      return harness::product_units(dtype, values, oracle.find("out_v").download());
    }
  if constexpr (std::is_same_v<Args, IndexTopkForward>)
    if (output == "scores") return score_units(oracle);
  return {};
}

/// The same with the norm of the terms in place of that of their sums, which may cancel.
void judge_by_norm(const Expected& expected, const std::vector<double>& actual,
                   harness::Report& report) {
  double error = 0;
  bool finite = true;
  for (std::size_t i = 0; i < actual.size(); ++i) {
    const double difference = actual[i] - expected.values[i];
    finite = finite && std::isfinite(actual[i]) && std::isfinite(expected.values[i]);
    error += difference * difference;
  }
  if (!finite) return;  // what is not finite must be so in both
  report.rms = std::sqrt(error) / expected.norm;
  report.ok = report.rms <= expected.limit.value;
  if (report.ok) report.note.clear();
}

Finding finding_of(const Expected& expected, const std::vector<double>& actual,
                   const harness::Rows& rows) {
  const std::string name(expected.field->name);
  const bool exact = expected.limit.value == 0;
  Finding finding{
      exact ? harness::compare_exactly(name, actual, expected.values)
            : harness::compare(name, actual, expected.values, expected.limit, expected.units),
      {},
      {}};
  if (expected.norm > 0) judge_by_norm(expected, actual, finding.report);
  locate(*expected.field, expected.shape, rows, actual, expected.values, expected.units, finding);
  return finding;
}

template <class Args>
Judge judge_of_operator(const DumpedCall& call, const harness::Rows& rows) {
  // An operator that is defined to the last bit is so in its own types.
  PlacedTensors oracle(call, {.device = {}, .rows = rows, .as_f64 = !is_exact(call.op)});
  if constexpr (std::is_same_v<Args, IndexTopkForward>)
    if (call.outputs.contains("indices")) return selection_judge(call, rows);
  run(oracle.arguments<Args>(), kOracle);
  const DType dtype = dtype_of(call);
  std::vector<Expected> expected;
  for (const FormatField& field : call.fields) {
    if (!call.outputs.contains(field.name)) continue;
    const Tensor& tensor = oracle.find(field.name).tensor();
    expected.push_back({.field = &field,
                        .shape = {tensor.shape.begin(), tensor.shape.begin() + tensor.rank},
                        .values = values_of(oracle.find(field.name)),
                        .units = {},
                        .limit = limit_of(call.op, field.name, dtype)});
  }
  const Norms norms = gradient_norms(oracle.arguments<Args>());
  for (Expected& each : expected)
    if (const auto norm = norms.find(each.field->name); norm != norms.end())
      each.norm = norm->second;
  for (Expected& each : expected)
    each.units = units_of<Args>(oracle, each.field->name, each.values, dtype);
  return [expected = std::move(expected), rows](const Outputs& outputs) {
    std::vector<Finding> findings;
    for (const Expected& each : expected)
      if (const auto found = outputs.find(each.field->name); found != outputs.end())
        findings.push_back(finding_of(each, found->second, rows));
    return findings;
  };
}

}  // namespace

bool is_exact(std::string_view op) {
  return op == "key_windows" || op == "window_indices" || op == "quantize_fp8";
}

Judge judge_of(const DumpedCall& call, const harness::Rows& rows) {
  Judge judge;
  for_each_operator([&]<class Args>(std::type_identity<Args>) {
    if (call.op == Args::kOperator) judge = judge_of_operator<Args>(call, rows);
  });
  return judge;
}

}  // namespace winnow::dump
