// SPDX-License-Identifier: Apache-2.0
// One training step, call by call.
#include "tools/timed_step.h"

#include <algorithm>
#include <utility>

#include "harness/backends.h"
#include "harness/calls.h"
#include "harness/training_step.h"
#include "tools/progress.h"
#include "tools/spread.h"
#include "tools/step_check.h"
#include "tools/timing.h"

namespace winnow::tools {
namespace {

using harness::Call;
using harness::TrainingStep;

constexpr std::int64_t kComparedRows = 16;
constexpr std::int64_t kComparedKeys = 8;
// Of the progress bar, beside 1 for the step itself.
constexpr double kInputsShare = 0.05;
constexpr double kCheckShare = 0.5;

double bytes_of(const harness::Buffer& buffer) {
  const Tensor& tensor = buffer.tensor();
  auto bytes = static_cast<double>(element_bytes(tensor.dtype));
  for (std::int32_t i = 0; i < tensor.rank; ++i) bytes *= static_cast<double>(tensor.shape[i]);
  return bytes;
}

double largest_workspace(const std::vector<Stage>& stages, std::string_view op) {
  std::size_t largest = 0;
  for (const Stage& stage : stages)
    if (stage.call.starts_with(op)) largest = std::max(largest, stage.workspace_bytes);
  return static_cast<double>(largest);
}

std::vector<MemoryUse> memory_of(const TrainingStep& step, const std::vector<Stage>& stages) {
  const harness::Case& c = step.c;
  const auto queries = static_cast<double>(c.tokens);
  const auto heads = static_cast<double>(c.heads);
  return {
      {"indexer: workspace", largest_workspace(stages, "index_topk_forward"),
       "fp32 scores [queries, keys]", 4 * queries * static_cast<double>(c.index_keys())},
      {"attention: indices, scores, lse, workspace",
       bytes_of(step.indices) + bytes_of(step.scores) + bytes_of(step.lse) +
           largest_workspace(stages, "sparse_attention"),
       "bf16 weights [heads, queries, keys]", 2 * heads * queries * static_cast<double>(c.keys())}};
}

/// Over the rows that count: those with at least two keys to choose from.
double mean_loss(const TrainingStep& step) {
  double sum = 0;
  for (const double loss : step.loss.download()) sum += loss;
  const auto counted =
      std::count_if(step.batch.places.begin(), step.batch.places.end(),
                    [](const harness::QueryPlace& place) { return place.index_keys > 1; });
  return counted > 0 ? sum / static_cast<double>(counted) : 0;
}

}  // namespace

std::size_t StepResult::failed() const {
  return std::count_if(reports.begin(), reports.end(), [](const auto& each) { return !each.ok; });
}

StepResult run_step(const harness::Case& c, const Execution& execution, std::uint64_t seed) {
  const Device device = harness::device_of(execution.backend);
  Progress progress(1 + kInputsShare + kCheckShare);
  progress.begin("making inputs", kInputsShare);
  TrainingStep step(c, device, seed);
  std::vector<Call> calls;
  step.visit_calls(
      [&](const auto& args, double flops) { calls.push_back(harness::call(args, flops)); });
  double flops = 0;
  for (const Call& call : calls) flops += call.flops;
  if (device.kind == DeviceKind::cuda) {  // the first calls load kernels and fill memory pools
    for (const Call& call : calls) call.run(execution);
    step.clear_sums();
  }

  StepResult result;
  for (const Call& call : calls) {
    progress.begin(call.name, call.flops / flops);
    const double seconds = time_once(device, [&] { call.run(execution); });
    result.stages.push_back(
        {call.name, call.kernel(execution), seconds, call.flops, call.workspace_bytes(execution)});
  }
  result.memory = memory_of(step, result.stages);
  result.mean_loss = mean_loss(step);

  progress.begin("comparing with the reference", kCheckShare);
  const harness::Rows rows = spread(c.tokens, kComparedRows);
  harness::Rows keys = spread(c.keys(), kComparedKeys + 2);
  keys = {keys.begin() + 1, keys.end() - 1};  // hardly a query sees the last one
  result.reports = check_rows(step, rows);
  for (harness::Report& report : check_sums(step, keys, c.heads / 2))
    result.reports.push_back(std::move(report));
  result.compared_rows = rows.size();
  result.compared_keys = keys.size();
  return result;
}

}  // namespace winnow::tools
