// SPDX-License-Identifier: Apache-2.0
// The reference backend's table.
#include "backend.h"

#include <fmt/format.h>

#include "core/refusals.h"
#include "core/threads.h"
#include "reference/ops.h"

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

template <class Args>
constexpr Op<Args> op() {
  return {why_not_op<Args>, workspace_bytes_of<Args>, run_op<Args>};
}

}  // namespace

const BackendTable reference_backend = {
    .backend = Backend::reference,
    .reaches = DeviceKind::cpu,
    .why_not = [] { return std::string(); },
    .describe = [] { return fmt::format("plain loops in double on {} threads", thread_count({})); },
    .ops = {op<KeyWindows>(), op<WindowIndices>(), op<IndexTopkForward>(), op<IndexTopkBackward>(),
            op<SparseAttentionForward>(), op<SparseAttentionBackward>(),
            op<ValueProjectionForward>(), op<ValueProjectionBackward>(), op<IndexTarget>(),
            op<IndexLoss>(), op<DenseIndexLossForward>(), op<DenseIndexLossBackward>(),
            op<QuantizeFp8>()}};

}  // namespace winnow
