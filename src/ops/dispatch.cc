// SPDX-License-Identifier: Apache-2.0
#include "ops/dispatch.h"

#include <array>

namespace winnow {
namespace {

constexpr std::array kBackends = {Backend::automatic, Backend::reference, Backend::cpu,
                                  Backend::cuda};
constexpr char kBackendNames[] = "automatic, reference, cpu or cuda";
constexpr std::size_t kWorkspaceAlignment = 16;
constexpr std::int32_t kMaxThreads = 1024;

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
  for (const Backend backend : kBackends) {
    if (name(backend) == word) return backend;
  }
  Check("backend_from_name")
      .fail("name", fmt::format("'{}'", word), refusal::one_of, kBackendNames);
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

std::vector<Backend> candidates(Backend asked) {
  if (asked != Backend::automatic) return {asked};
  return {Backend::cuda, Backend::cpu, Backend::reference};
}

std::string sentence(Backend backend, std::string_view reason) {
  return fmt::format("the {} backend {}", name(backend), reason);
}

std::string why_not(Backend backend) {
  if (backend == Backend::automatic) return {};
  const BackendTable* table = find_backend(backend);
  const std::string reason = table == nullptr ? refusal::not_built : table->why_not();
  return reason.empty() ? reason : sentence(backend, reason);
}

std::string why_not(Backend backend, Device device) {
  std::string reason = why_not(backend);
  if (reason.empty() && find_backend(backend)->reaches != device.kind) {
    reason = sentence(backend, fmt::format(refusal::device_out_of_reach, describe(device)));
  }
  return reason;
}

std::string describe(Backend backend) {
  const BackendTable* table = why_not(backend).empty() ? find_backend(backend) : nullptr;
  return table == nullptr ? std::string() : table->describe();
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
  if (reinterpret_cast<std::uintptr_t>(execution.workspace) % kWorkspaceAlignment != 0) {
    check.fail("workspace", fmt::to_string(execution.workspace), refusal::misaligned,
               kWorkspaceAlignment);
  }
}

void check_workspace(std::string_view op, const Execution& execution, std::size_t bytes) {
  if (execution.workspace != nullptr && execution.workspace_bytes < bytes) {
    Check(op).fail("workspace", fmt::format("of {} bytes", execution.workspace_bytes),
                   refusal::workspace_small, bytes);
  }
}

}  // namespace winnow
