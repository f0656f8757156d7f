// SPDX-License-Identifier: Apache-2.0
#include "tools/terminal.h"

#include <cstdlib>
#include <string>
#include <string_view>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

namespace winnow::tools {
namespace {

std::string_view variable(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "" : value;
}

bool same_file(const struct stat& a, const struct stat& b) {
  return a.st_dev == b.st_dev && a.st_ino == b.st_ino;
}

/// Open MPI gives its ranks pipes or pseudo-terminals and copies what they write to the streams of
/// mpirun, which count instead. Where another program stands between the two, nothing is known.
bool mpirun_has_terminal(int stream) {
  const std::string path = fmt::format("/proc/{}/fd/{}", getppid(), stream);
  const int of_parent = open(path.c_str(), O_WRONLY | O_NOCTTY | O_NONBLOCK | O_CLOEXEC);
  if (of_parent < 0) return false;
  struct stat own {};
  struct stat other {};
  const bool known = fstat(stream, &own) == 0 && fstat(of_parent, &other) == 0 &&
                     !same_file(own, other) && !S_ISREG(own.st_mode);
  const bool is_terminal = known && isatty(of_parent) != 0;
  close(of_parent);
  return is_terminal;
}

bool leads_to_terminal(int stream) {
  return variable("OMPI_COMM_WORLD_RANK").empty() ? isatty(stream) != 0
                                                  : mpirun_has_terminal(stream);
}

bool takes_escapes(int stream) {
  return leads_to_terminal(stream) && !variable("TERM").empty() && variable("TERM") != "dumb";
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
