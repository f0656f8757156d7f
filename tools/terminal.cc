// SPDX-License-Identifier: Apache-2.0
#include "tools/terminal.h"

#include <cstdlib>
#include <string_view>

#include <unistd.h>

namespace winnow::tools {
namespace {

std::string_view variable(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "" : value;
}

bool takes_escapes(int stream) {
  return isatty(stream) != 0 && !variable("TERM").empty() && variable("TERM") != "dumb";
}

}  // namespace

bool can_redraw_stderr() { return takes_escapes(STDERR_FILENO); }

std::string coloured_line(const harness::Report& report) {
  std::string text = harness::line(report);
  static const bool coloured = takes_escapes(STDOUT_FILENO) && variable("NO_COLOR").empty();
  if (!coloured || report.skipped) return text;
  const std::string_view verdict = report.ok ? "ok" : "FAILED";
  const std::size_t at = text.find(verdict, text.find("limit"));
  if (at == std::string::npos) return text;
  constexpr char kGreen[] = "\033[32m";
  constexpr char kRed[] = "\033[31m";
  constexpr char kPlain[] = "\033[0m";
  text.insert(at + verdict.size(), kPlain);
  return text.insert(at, report.ok ? kGreen : kRed);
}

}  // namespace winnow::tools
