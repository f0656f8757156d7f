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
#include "harness/workload.h"
#include "winnow/winnow.h"

namespace winnow::tools {

struct Call {
  std::string name;  // the function's
  double flops = 0;  // 0: bound by memory
  std::function<void(const Execution&)> run;
  std::function<std::string(const Execution&)> why_not;
  std::function<std::size_t(const Execution&)> workspace_bytes;
};

template <class Args>
Call call(std::string name, const Args& args, double flops = 0) {
  return {std::move(name), flops,
          [args](const Execution& execution) { harness::run(args, execution); },
          [args](const Execution& execution) { return why_not(args, execution); },
          [args](const Execution& execution) { return workspace_bytes(args, execution); }};
}

/// Calls in an order in which each finds what it reads.
struct Calls {
  std::shared_ptr<const void> memory;  // of their tensors
  std::vector<Call> list;
};
Calls calls_of(std::string_view op, const harness::Case& c, Device device, std::uint64_t seed);

}  // namespace winnow::tools
