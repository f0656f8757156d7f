// SPDX-License-Identifier: Apache-2.0
// What the program prints: no line of it is lost without an error.
#pragma once

#include <string_view>

namespace winnow::tools {

/// Puts /dev/null, open the wrong way round, where the caller closed stdin, stdout or stderr: their
/// use fails as before, but no file that the program opens takes their place.
void fill_closed_streams();

/// Throws std::system_error unless all that was printed to stdout has been written.
void flush_output();

/// "winnow: sentence" on stderr. Nothing happens where that cannot be written: the exit code says
/// as much.
void complain(std::string_view sentence);

}  // namespace winnow::tools
