// SPDX-License-Identifier: Apache-2.0
// The border of the public API: host memory that runs out behind it becomes an Error.
#pragma once

#include <new>
#include <string_view>

namespace winnow {

/// Throws Error(out_of_memory), which names `function` if there is memory for such a message.
[[noreturn]] void throw_out_of_memory(std::string_view function);

/// Returns body(), which is all that the public `function` does; std::bad_alloc becomes an Error.
template <class Body>
decltype(auto) with_memory_errors(std::string_view function, const Body& body) {
  try {
    return body();
  } catch (const std::bad_alloc&) {
    throw_out_of_memory(function);
  }
}

}  // namespace winnow
