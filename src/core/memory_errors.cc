// SPDX-License-Identifier: Apache-2.0
#include "core/memory_errors.h"

#include <string>

#include <fmt/format.h>

#include "core/refusals.h"
#include "winnow/error.h"

namespace winnow {
namespace {

/// Made when the library is loaded: to copy it takes no memory.
const Error kWithoutFunction(ErrorCode::out_of_memory, refusal::no_host_memory);

}  // namespace

void throw_out_of_memory(std::string_view function) {
  try {
    throw Error(ErrorCode::out_of_memory, fmt::format("{}: {}", function, refusal::no_host_memory));
  } catch (const std::bad_alloc&) {
    throw kWithoutFunction;
  }
}

}  // namespace winnow
