// SPDX-License-Identifier: Apache-2.0
// What the terminals behind stdout and stderr can show.
#pragma once

#include <string>

#include "harness/compare.h"

namespace winnow::tools {

/// Whether a line on stderr can be drawn again: it is a terminal, and TERM does not say "dumb".
bool can_redraw_stderr();

/// harness::line, its verdict in green or red where stdout is such a terminal and NO_COLOR is not
/// set.
std::string coloured_line(const harness::Report& report);

}  // namespace winnow::tools
