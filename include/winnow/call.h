// SPDX-License-Identifier: Apache-2.0
// What can be asked of a call of any operator, by its argument struct.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "winnow/execution.h"
#include "winnow/fields.h"

namespace winnow {

/// A kernel that a call might take.
struct Candidate {
  Backend backend = Backend::automatic;
  std::string_view kernel;  // empty: the reason holds for the whole backend
  std::string why_not;      // empty: it can run the call
};

/// The argument struct of an operator: it knows the operator's name and its own fields.
template <class Args>
concept Arguments = requires {
  Args::kOperator;
  Args::fields();
};

/// The functions behind those below. The library holds them for every operator of operators.h.
template <Arguments Args>
struct Operator {
  static void run(const Args& args, const Execution& execution);
  static std::size_t workspace_bytes(const Args& args, const Execution& execution);
  static std::string why_not(const Args& args, const Execution& execution);
  static std::vector<Candidate> explain(const Args& args, const Execution& execution);
  static std::vector<std::string_view> kernels(Backend backend);
};

// All of these but kernels throw Error(invalid_argument) for a call that is not legal anywhere.

/// Runs the operator: the same as calling the function with its name.
template <Arguments Args>
void run(const Args& args, const Execution& execution = {}) {
  Operator<Args>::run(args, execution);
}

/// The memory that the call takes. Pass that much in Execution, or let the call take it.
template <Arguments Args>
std::size_t workspace_bytes(const Args& args, const Execution& execution = {}) {
  return Operator<Args>::workspace_bytes(args, execution);
}

/// Empty if the call can run as asked, else a sentence for every kernel that says why not.
template <Arguments Args>
std::string why_not(const Args& args, const Execution& execution = {}) {
  return Operator<Args>::why_not(args, execution);
}

/// All kernels in the order in which they are tried: the first without a reason runs.
template <Arguments Args>
std::vector<Candidate> explain(const Args& args, const Execution& execution = {}) {
  return Operator<Args>::explain(args, execution);
}

/// The names that Execution::kernel may ask for, best first; none for a backend that is not in this
/// build or does not have the operator.
template <Arguments Args>
std::vector<std::string_view> kernels(Backend backend) {
  return Operator<Args>::kernels(backend);
}

}  // namespace winnow
