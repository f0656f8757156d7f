// SPDX-License-Identifier: Apache-2.0
#include "tools/interrupt.h"

#include <csignal>
#include <string_view>

#include <unistd.h>

namespace winnow::tools {
namespace {

volatile std::sig_atomic_t interrupted = 0;

void note_interrupt(int) {
  interrupted = 1;
  constexpr std::string_view kLine = "\nwinnow: ends after this call; Ctrl-C again ends it now\n";
  [[maybe_unused]] const auto written = write(STDERR_FILENO, kLine.data(), kLine.size());
}

}  // namespace

void watch_for_interrupts() {
  struct sigaction before {};
  if (sigaction(SIGINT, nullptr, &before) != 0 || before.sa_handler == SIG_IGN) return;
  struct sigaction action {};
  action.sa_handler = note_interrupt;
  action.sa_flags = static_cast<int>(SA_RESETHAND | SA_RESTART);  // the next one is not caught
  sigaction(SIGINT, &action, nullptr);
}

void stop_if_interrupted() {
  if (interrupted != 0) throw Interrupted();
}

}  // namespace winnow::tools
