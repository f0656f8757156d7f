// SPDX-License-Identifier: Apache-2.0
// Call: one call of an op with its arguments, and all of the calls that an op has.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "harness/cases.h"
#include "harness/kernel_choice.h"
#include "harness/workload.h"
#include "winnow/winnow.h"

namespace winnow::tools {

struct Call {
  std::string name;  // the function's
  double flops = 0;  // 0: bound by memory
  std::function<void(const Execution&)> run;
  std::function<std::string(const Execution&)> why_not;
  std::function<std::size_t(const Execution&)> workspace_bytes;
  std::function<std::vector<Candidate>(const Execution&)> explain;

  /// The name of the kernel that runs the call, which can run.
  std::string kernel(const Execution& execution) const {
    return std::string(harness::chosen(explain(execution))->kernel);
  }
};

template <class Args>
Call call(std::string name, const Args& args, double flops = 0) {
  using harness::for_operator;
  return {std::move(name),
          flops,
          [args](const Execution& e) { harness::run(args, for_operator<Args>(e)); },
          [args](const Execution& e) { return why_not(args, for_operator<Args>(e)); },
          [args](const Execution& e) { return workspace_bytes(args, for_operator<Args>(e)); },
          [args](const Execution& e) { return winnow::explain(args, for_operator<Args>(e)); }};
}

/// Calls in an order in which each finds what it reads.
struct Calls {
  std::shared_ptr<const void> memory;  // of their tensors
  std::vector<Call> list;
};
Calls calls_of(std::string_view op, const harness::Case& c, Device device, std::uint64_t seed);

}  // namespace winnow::tools
