// SPDX-License-Identifier: Apache-2.0
// The median times of the calls of one op.
#include "tools/timed_calls.h"

#include <algorithm>
#include <bit>
#include <thread>

#include "harness/backends.h"
#include "harness/families.h"
#include "harness/memory.h"

namespace winnow::tools {
namespace {

using harness::Call;
using harness::Calls;

constexpr double kSecondsPerOp = 15;
constexpr std::int64_t kFewestTokens = 8;

bool is_backward(const Call& call) { return call.name.find("_backward") != std::string::npos; }

bool is_asked_for(const Call& call, Direction direction) {
  return direction == Direction::both || is_backward(call) == (direction == Direction::backward);
}

/// The largest power of two of query rows, at most the case's, whose calls fit the time; judged by
/// few rows, which overstates a call with much work beside its rows.
std::int64_t affordable_tokens(const Plan& plan, const Execution& execution, Device device) {
  if (plan.c.tokens <= kFewestTokens) return plan.c.tokens;
  harness::Case c = plan.c;
  c.tokens = kFewestTokens;
  const Calls calls = calls_of(plan.op, c, device, plan.seed);
  double seconds = 0;
  for (const Call& call : calls.list) {
    if (!call.why_not(execution).empty()) continue;
    const auto run = [&] { call.run(execution); };
    const double first = time_once(device, run);
    if (is_asked_for(call, plan.direction)) seconds += std::min(first, time_once(device, run));
  }
  const int times_as_long = plan.scaling ? 1 + thread_count(execution) : 1;
  const double all_repeats = seconds * (plan.repeats + 1) * times_as_long;
  const double factor = kSecondsPerOp / std::max(all_repeats, 1e-9);
  const auto most = static_cast<double>(plan.c.tokens) / static_cast<double>(kFewestTokens);
  if (factor >= most) return plan.c.tokens;
  return kFewestTokens * static_cast<std::int64_t>(
                             std::bit_floor(static_cast<std::uint64_t>(std::max(factor, 1.0))));
}

}  // namespace

int thread_count(const Execution& execution) {
  return execution.threads > 0 ? execution.threads
                               : static_cast<int>(std::thread::hardware_concurrency());
}

std::vector<Measured> benchmark(const Plan& plan, const Execution& execution, Progress& progress) {
  Execution one_thread = execution;
  one_thread.threads = 1;
  const Device device = harness::device_of(execution.backend);
  progress.begin(plan.op, 0);
  harness::Case c = plan.c;
  if (plan.choose_tokens) c.tokens = affordable_tokens(plan, execution, device);
  const Calls calls = calls_of(plan.op, c, device, plan.seed);
  std::vector<Measured> measured;
  for (const Call& call : calls.list) {
    progress.begin(call.name, 1.0 / static_cast<double>(calls.list.size()));
    const std::string reason = call.why_not(execution);
    if (!is_asked_for(call, plan.direction)) {
      // Backward reads what forward wrote.
      if (plan.direction == Direction::backward && reason.empty()) call.run(execution);
      continue;
    }
    Measured& result = measured.emplace_back();
    result.call = call.name;
    result.c = c;
    result.flops = call.flops;
    result.why_not = reason;
    if (!reason.empty()) continue;
    result.kernel = call.kernel(execution);
    result.workspace_bytes = call.workspace_bytes(execution);
    const auto timed = [&](Execution each) {
      // As callers do that call more than once.
      each.workspace_bytes = call.workspace_bytes(each);
      const harness::Buffer workspace(device, DType::i32,
                                      {static_cast<std::int64_t>(each.workspace_bytes / 4) + 1});
      each.workspace = workspace.tensor().data;
      return measure(device, plan.repeats, [&] { call.run(each); });
    };
    result.timing = timed(execution);
    if (plan.scaling) result.one_thread = timed(one_thread);
  }
  return measured;
}

}  // namespace winnow::tools
