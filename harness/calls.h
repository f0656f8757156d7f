// SPDX-License-Identifier: Apache-2.0
// Call: one call of an operator without the type of its arguments.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "harness/kernel_choice.h"
#include "winnow/winnow.h"

namespace winnow::harness {

/// A kernel that an Execution asks for counts where the operator has it.
struct Call {
  std::string_view op;  // the operator
  std::string name;     // the operator's too, with a remark where it has several calls
  double flops = 0;     // 0: bound by memory
  std::function<void(const Execution&)> run;
  std::function<std::string(const Execution&)> why_not;
  std::function<std::size_t(const Execution&)> workspace_bytes;
  std::function<std::vector<Candidate>(const Execution&)> explain;

  /// The name of the kernel that runs the call, which can run.
  std::string kernel(const Execution& execution) const {
    return std::string(chosen(explain(execution))->kernel);
  }
};

template <Arguments Args>
Call call(const Args& args, double flops = 0) {
  return {
      Args::kOperator,
      Args::kOperator,
      flops,
      [args](const Execution& e) { winnow::run(args, for_operator<Args>(e)); },
      [args](const Execution& e) { return winnow::why_not(args, for_operator<Args>(e)); },
      [args](const Execution& e) { return winnow::workspace_bytes(args, for_operator<Args>(e)); },
      [args](const Execution& e) { return winnow::explain(args, for_operator<Args>(e)); }};
}

/// Calls in an order in which each finds what it reads.
struct Calls {
  std::shared_ptr<const void> memory;  // of their tensors
  std::vector<Call> list;
};

}  // namespace winnow::harness
