// SPDX-License-Identifier: Apache-2.0
// The reference backend's table.
#include "backend.h"

#include <fmt/format.h>

#include "backend_operators.h"
#include "core/refusals.h"
#include "core/threads.h"

namespace winnow {
namespace {

template <class Args>
std::string why_not_op(const Args& args, const Execution& execution) {
  const std::size_t least = reference::scratch_bytes(args, execution);
  if (least <= execution.workspace_limit) return {};
  return fmt::format(refusal::over_limit, least, execution.workspace_limit);
}

template <class Args>
std::size_t workspace_bytes_of(const Args& args, const Execution& execution) {
  const std::size_t lane = reference::scratch_bytes(args, execution);
  return lane * static_cast<std::size_t>(lane_count(execution, lane));
}

template <class Args>
void run_op(const Args& args, const Execution& execution) {
  const HostWorkspace workspace(execution, workspace_bytes_of(args, execution));
  reference::run(args, workspace.execution());
}

struct Loops {
  template <class Args>
  static Kernels<Args> kernels() {
    static constexpr Kernel<Args> kLoops[] = {
        {"loops", why_not_op<Args>, workspace_bytes_of<Args>, run_op<Args>}};
    return kLoops;
  }
};

}  // namespace

const BackendTable reference_backend = {
    .backend = Backend::reference,
    .why_not = [] { return std::string(); },
    .why_not_device = [](Device) { return std::string(); },
    .describe = [] { return fmt::format("plain loops in double on {} threads", thread_count({})); },
    .kernels = kernel_table<Loops>()};

}  // namespace winnow
