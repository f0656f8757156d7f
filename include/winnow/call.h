// SPDX-License-Identifier: Apache-2.0
// Runs and queries a call of any operator, given its argument struct.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "winnow/execution.h"
#include "winnow/fields.h"

namespace winnow {

/// A kernel that might run a call.
struct Candidate {
  Backend backend = Backend::automatic;
  std::string_view kernel;  // empty: the reason applies to the whole backend
  std::string why_not;      // empty: it can run the call
};

/// The argument struct of an operator, which has the name of the operator and a list of its fields.
template <class Args>
concept Arguments = requires {
  Args::kOperator;
  Args::fields();
};

/// Implements the functions below; the library instantiates it for every operator of operators.h.
template <Arguments Args>
struct Operator {
  static void run(const Args& args, const Execution& execution);
  static std::size_t workspace_bytes(const Args& args, const Execution& execution);
  static std::string why_not(const Args& args, const Execution& execution);
  static std::vector<Candidate> explain(const Args& args, const Execution& execution);
  static std::vector<std::string_view> kernels(Backend backend);
};

// All of these except kernels throw Error(invalid_argument) for a call that is invalid on every
// backend. No operator works in place: a call in which an output or the given workspace shares
// memory with another argument is invalid. Inputs may share memory, and views may interleave.

/// Runs the operator, like the function of its name.
template <Arguments Args>
void run(const Args& args, const Execution& execution = {}) {
  Operator<Args>::run(args, execution);
}

/// The workspace that the call needs, in bytes. Pass that much in Execution, or let the call
/// allocate it.
template <Arguments Args>
std::size_t workspace_bytes(const Args& args, const Execution& execution = {}) {
  return Operator<Args>::workspace_bytes(args, execution);
}

/// Empty if the call can run as requested, else the reason for every kernel why it cannot.
template <Arguments Args>
std::string why_not(const Args& args, const Execution& execution = {}) {
  return Operator<Args>::why_not(args, execution);
}

/// All kernels in the order in which they are tried; the first with an empty why_not runs.
template <Arguments Args>
std::vector<Candidate> explain(const Args& args, const Execution& execution = {}) {
  return Operator<Args>::explain(args, execution);
}

/// The valid names for Execution::kernel, best first; empty for a backend that is not in this build
/// or does not have the operator.
template <Arguments Args>
std::vector<std::string_view> kernels(Backend backend) {
  return Operator<Args>::kernels(backend);
}

}  // namespace winnow
