// SPDX-License-Identifier: Apache-2.0
// Ctrl-C: the first ends the program before its next call, the second at once.
#pragma once

#include <csignal>
#include <exception>

namespace winnow::tools {

/// The exit code of a program that Ctrl-C ended.
constexpr int kInterrupted = 128 + SIGINT;

class Interrupted : public std::exception {
 public:
  const char* what() const noexcept override { return "interrupted"; }
};

/// From here on SIGINT is waited for, unless whoever started the program has it ignored.
void watch_for_interrupts();

/// Throws Interrupted after a SIGINT. Called between calls of operators.
void stop_if_interrupted();

}  // namespace winnow::tools
