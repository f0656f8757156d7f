// SPDX-License-Identifier: Apache-2.0
#include "tools/output.h"

#include <cerrno>
#include <cstdio>
#include <string>
#include <system_error>

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

namespace winnow::tools {

void fill_closed_streams() {
  for (const int stream : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (fcntl(stream, F_GETFD) != -1) continue;
    // The lowest free descriptor is this one.
    [[maybe_unused]] const int opened =
        open("/dev/null", stream == STDIN_FILENO ? O_WRONLY : O_RDONLY);
  }
}

void flush_output() {
  if (std::fflush(stdout) != 0)
    throw std::system_error(errno, std::generic_category(), "cannot write to stdout");
}

void complain(std::string_view sentence) {
  const std::string line = fmt::format("winnow: {}\n", sentence);
  std::fwrite(line.data(), 1, line.size(), stderr);  // fmt::print would throw
}

}  // namespace winnow::tools
