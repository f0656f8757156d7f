// SPDX-License-Identifier: Apache-2.0
#include "ops/dispatch.h"

#include <algorithm>
#include <array>
#include <limits>

#include <fmt/ranges.h>

namespace winnow {
namespace {

constexpr std::array kBackends = {Backend::automatic, Backend::reference, Backend::cpu,
                                  Backend::cuda};
constexpr char kBackendNames[] = "automatic, reference, cpu or cuda";
constexpr std::size_t kWorkspaceAlignment = 16;
constexpr std::int32_t kMaxThreads = 1024;

void check_alignment(const Check& check, const char* argument, const void* memory) {
  if (reinterpret_cast<std::uintptr_t>(memory) % kWorkspaceAlignment == 0) return;
  check.fail(argument, fmt::to_string(memory), refusal::misaligned, kWorkspaceAlignment);
}

/// The caller's workspace as a tensor of one byte an element.
Tensor as_bytes(const Execution& execution) {
  constexpr std::size_t kMost = std::numeric_limits<std::int64_t>::max();
  return tensor(execution.workspace, DType::f8_e4m3,
                {static_cast<std::int64_t>(std::min(execution.workspace_bytes, kMost))});
}

}  // namespace

const char* version() { return WINNOW_VERSION; }

std::string_view name(Backend backend) {
  switch (backend) {
    case Backend::automatic:
      return "automatic";
    case Backend::reference:
      return "reference";
    case Backend::cpu:
      return "cpu";
    case Backend::cuda:
      return "cuda";
  }
  return "unknown";
}

Backend backend_from_name(std::string_view word) {
  constexpr char kFunction[] = "backend_from_name";
  return with_memory_errors(kFunction, [&] {
    for (const Backend backend : kBackends) {
      if (name(backend) == word) return backend;
    }
    Check(kFunction).fail("name", fmt::format("'{}'", word), refusal::one_of, kBackendNames);
  });
}

const BackendTable* find_backend(Backend backend) {
  switch (backend) {
    case Backend::reference:
      return &reference_backend;
    case Backend::cpu:
      return &cpu_backend;
    case Backend::cuda:
      return find_cuda_backend();
    case Backend::automatic:
      break;
  }
  return nullptr;
}

DeviceKind device_kind(Backend backend) {
  return backend == Backend::cuda ? DeviceKind::cuda : DeviceKind::cpu;
}

std::span<const Backend> backends_to_try(Backend asked) {
  // In the order of preference, so that every single one can be asked for as well.
  static constexpr std::array kBestFirst = {Backend::cuda, Backend::cpu, Backend::reference};
  if (asked == Backend::automatic) return kBestFirst;
  const auto* const found = std::find(kBestFirst.begin(), kBestFirst.end(), asked);
  return {found, 1};
}

bool is_asked_for(std::string_view kernel, const Execution& execution) {
  return execution.kernel == nullptr || kernel == execution.kernel;
}

void check_kernel_name(std::string_view op, std::string_view kernel,
                       const std::vector<std::string_view>& names) {
  // Where no backend offers any kernel, the refusals of the backends say more.
  if (names.empty() || std::find(names.begin(), names.end(), kernel) != names.end()) return;
  Check(op).fail("kernel", fmt::format("'{}'", kernel), refusal::one_of,
                 fmt::format("one of {}", fmt::join(names, ", ")));
}

std::string sentences(const std::vector<Candidate>& candidates) {
  std::string text;
  for (const Candidate& candidate : candidates) {
    if (!text.empty()) text += "; ";
    text += candidate.kernel.empty()
                ? fmt::format("the {} backend {}", name(candidate.backend), candidate.why_not)
                : fmt::format("the {} backend's kernel {} {}", name(candidate.backend),
                              candidate.kernel, candidate.why_not);
  }
  return text;
}

std::string why_not(Backend backend) {
  if (backend == Backend::automatic) return {};
  return with_memory_errors("why_not", [&] {
    const BackendTable* const table = find_backend(backend);
    const std::string reason = table == nullptr ? refusal::not_built : table->why_not();
    return reason.empty() ? reason : sentences({{backend, {}, reason}});
  });
}

std::string why_not(Backend backend, Device device) {
  const BackendTable* const table = find_backend(backend);
  if (table == nullptr) return refusal::not_built;
  std::string reason = table->why_not();
  if (!reason.empty()) return reason;
  if (device_kind(backend) != device.kind) {
    return fmt::format(refusal::device_out_of_reach, describe(device));
  }
  return table->why_not_device(device);
}

std::string describe(Backend backend) {
  return with_memory_errors("describe", [&] {
    const BackendTable* const table = why_not(backend).empty() ? find_backend(backend) : nullptr;
    return table == nullptr ? std::string() : table->describe();
  });
}

void check_execution(std::string_view op, const Execution& execution) {
  const Check check(op);
  if (name(execution.backend) == "unknown") {
    check.fail("backend", fmt::to_string(static_cast<std::int32_t>(execution.backend)),
               refusal::one_of, kBackendNames);
  }
  check.in_range("threads", execution.threads, 0, kMaxThreads);
  if (execution.workspace == nullptr && execution.workspace_bytes != 0) {
    check.fail("workspace", "null", refusal::workspace_null);
  }
  check_alignment(check, "workspace", execution.workspace);
}

void check_overlaps(std::string_view op, std::span<const NamedTensor> tensors,
                    const Execution& execution) {
  const auto refuse = [&](const char* name, const char* other) {
    Check(op).fail(name, fmt::format("overlaps {}", other), refusal::shared_memory);
  };
  for (const NamedTensor& output : tensors) {
    if (!output.is_written) continue;
    for (const NamedTensor& other : tensors) {
      // Two outputs are compared once.
      if (&other == &output || (other.is_written && &other < &output)) continue;
      if (meet(output.hull, other.hull) && share_memory(*output.tensor, *other.tensor))
        refuse(output.name, other.name);
    }
  }
  const Hull workspace = {reinterpret_cast<std::uintptr_t>(execution.workspace),
                          execution.workspace_bytes};
  for (const NamedTensor& other : tensors)
    if (meet(workspace, other.hull) && share_memory(as_bytes(execution), *other.tensor))
      refuse("workspace", other.name);
}

Execution with_workspace(std::string_view op, const Execution& execution, std::size_t bytes) {
  if (execution.workspace != nullptr && execution.workspace_bytes < bytes) {
    Check(op).fail("workspace", fmt::format("of {} bytes", execution.workspace_bytes),
                   refusal::workspace_small, bytes);
  }
  if (execution.workspace != nullptr || execution.allocate == nullptr || bytes == 0) {
    return execution;
  }
  Execution result = execution;
  result.workspace = execution.allocate(execution.allocate_context, bytes);
  result.workspace_bytes = bytes;
  if (result.workspace == nullptr) {
    throw Error(ErrorCode::out_of_memory,
                fmt::format("{}: {}", op, fmt::format(refusal::no_workspace, bytes)));
  }
  check_alignment(Check(op), "allocate", result.workspace);
  return result;
}

}  // namespace winnow
