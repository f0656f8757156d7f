// SPDX-License-Identifier: Apache-2.0
// The cpu backend's table.
#include "backend.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include <fmt/format.h>

#include "backend_operators.h"
#include "core/refusals.h"
#include "core/threads.h"
#include "cpu/simd.h"

namespace winnow {
namespace {

constexpr std::size_t kAlignment = Scratch::kAlignment;

/// What an op may plan with: a caller's workspace may have to be cut to begin at a vector's
/// boundary.
Execution planned(Execution execution) {
  execution.workspace_limit -= std::min(execution.workspace_limit, kAlignment);
  return execution;
}

template <class Args>
std::string why_not_op(const Args& args, const Execution& execution) {
  return cpu::why_not(args, execution);
}

template <class Args>
std::size_t workspace_bytes_of(const Args& args, const Execution& execution) {
  const std::size_t bytes = cpu::workspace_bytes(args, planned(execution));
  return bytes == 0 ? 0 : bytes + kAlignment;
}

template <auto kRun, class Args>
void run_aligned(const Args& args, const Execution& execution) {
  const HostWorkspace workspace(execution, workspace_bytes_of(args, execution));
  Execution aligned = planned(workspace.execution());
  const std::size_t skipped = -reinterpret_cast<std::uintptr_t>(aligned.workspace) % kAlignment;
  if (aligned.workspace != nullptr) {
    aligned.workspace = static_cast<std::byte*>(aligned.workspace) + skipped;
    aligned.workspace_bytes -= std::min(aligned.workspace_bytes, skipped);
  }
  kRun(args, aligned);
}

template <class Args>
std::string why_not_with_pairs(const Args& args, const Execution& execution) {
  const std::string reason = cpu::why_not_pairs(args);
  return reason.empty() ? cpu::why_not(args, execution) : reason;
}

struct CpuKernels {
  template <class Args>
  static Kernels<Args> kernels() {
    if constexpr (requires(const Args& args) { cpu::run(args, Execution{}); }) {
      using Run = void (*)(const Args&, const Execution&);
      static constexpr Kernel<Args> kSimd = {"simd", why_not_op<Args>, workspace_bytes_of<Args>,
                                             run_aligned<static_cast<Run>(cpu::run), Args>};
      if constexpr (requires(const Args& args) { cpu::run_pairs(args, Execution{}); }) {
        static constexpr Kernel<Args> kBoth[] = {
            {"avx512_bf16", why_not_with_pairs<Args>, workspace_bytes_of<Args>,
             run_aligned<static_cast<Run>(cpu::run_pairs), Args>},
            kSimd};
        return kBoth;
      } else {
        static constexpr Kernel<Args> kOne[] = {kSimd};
        return kOne;
      }
    } else {
      return {};
    }
  }
};

/// The best SIMD target that this machine has, among those that the library was compiled for.
std::string chosen_target() {
  const std::int64_t usable = hwy::SupportedTargets() & HWY_TARGETS;
  return hwy::TargetName(usable & -usable);  // better targets have lower bits
}

}  // namespace

const BackendTable cpu_backend = {
    .backend = Backend::cpu,
    .why_not = [] { return std::string(); },
    .why_not_device = [](Device) { return std::string(); },
    .describe = [] { return fmt::format("{} on {} threads", chosen_target(), thread_count({})); },
    .kernels = kernel_table<CpuKernels>()};

}  // namespace winnow
