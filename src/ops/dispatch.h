// SPDX-License-Identifier: Apache-2.0
// From a checked call to the backend that runs it, or to the text of a refusal.
#pragma once

#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include <fmt/format.h>

#include "backend.h"
#include "core/check.h"

namespace winnow {

/// A legal call: its name, its arguments with defaults filled in, the device of all its tensors.
template <class Args>
struct Checked {
  std::string_view op;
  Args args;
  Device device;
};

void check_execution(std::string_view op, const Execution& execution);
/// Throws if a workspace is given that cannot serve a call which needs `bytes`.
void check_workspace(std::string_view op, const Execution& execution, std::size_t bytes);

/// The backends that may be taken, best first.
std::vector<Backend> candidates(Backend asked);
/// Null where the backend is not in this build.
const BackendTable* find_backend(Backend backend);
/// Empty, or why the backend cannot run anything on this device.
std::string why_not(Backend backend, Device device);
std::string sentence(Backend backend, std::string_view reason);

template <class Args>
struct Choice {
  const Op<Args>* op = nullptr;
  std::string why_not;  // empty if there is an op
};

template <class Args>
Choice<Args> choose(const Checked<Args>& call, const Execution& execution) {
  Choice<Args> choice;
  for (const Backend backend : candidates(execution.backend)) {
    std::string reason = why_not(backend, call.device);
    if (reason.empty()) {
      const Op<Args>& op = std::get<Op<Args>>(find_backend(backend)->ops);
      const std::string refused =
          op.run == nullptr ? refusal::no_such_op : op.why_not(call.args, execution);
      if (refused.empty()) return {&op, {}};
      reason = sentence(backend, refused);
    }
    choice.why_not += choice.why_not.empty() ? reason : "; " + reason;
  }
  return choice;
}

template <class Args>
const Op<Args>& choose_or_throw(const Checked<Args>& call, const Execution& execution) {
  check_execution(call.op, execution);
  const Choice<Args> choice = choose(call, execution);
  if (choice.op == nullptr) {
    throw Error(ErrorCode::unsupported, fmt::format("{}: {}", call.op, choice.why_not));
  }
  return *choice.op;
}

template <class Args>
void run(const Checked<Args>& call, const Execution& execution) {
  const Op<Args>& op = choose_or_throw(call, execution);
  check_workspace(call.op, execution, op.workspace_bytes(call.args, execution));
  op.run(call.args, execution);
}

template <class Args>
std::size_t workspace_bytes(const Checked<Args>& call, const Execution& execution) {
  return choose_or_throw(call, execution).workspace_bytes(call.args, execution);
}

template <class Args>
std::string why_not(const Checked<Args>& call, const Execution& execution) {
  check_execution(call.op, execution);
  return choose(call, execution).why_not;
}

}  // namespace winnow
