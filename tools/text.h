// SPDX-License-Identifier: Apache-2.0
// Quantities and shapes as people read them.
#pragma once

#include <string>

#include "harness/cases.h"

namespace winnow::tools {

// Three digits and a unit.
std::string seconds_text(double seconds);        // "12.3 ms"
std::string bytes_text(double bytes);            // "1.50 GiB"
std::string rate_text(double flops_per_second);  // "284 GFLOP/s"

/// "64 heads, 576 channels (512 of values), 2048 keys a query"
std::string attention_text(const harness::Case& c);
/// "32 heads, 128 channels, 2048 of 4096 keys", or without the number of keys "2048 keys a query"
std::string indexer_text(const harness::Case& c, bool with_keys = true);

}  // namespace winnow::tools
