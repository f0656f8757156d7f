// SPDX-License-Identifier: Apache-2.0
// Error: the exception that every function of the library throws.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace winnow {

enum class ErrorCode : std::int32_t {
  invalid_argument = 1,  // invalid call: the message names argument, given and allowed values
  unsupported,           // valid call that cannot run here: the message is that of why_not
  out_of_memory,
  device,        // the CUDA runtime reported a failure
  communication  // a collective failed or timed out
};

class Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& message) : std::runtime_error(message), code_(code) {}
  ErrorCode code() const noexcept { return code_; }

 private:
  ErrorCode code_;
};

}  // namespace winnow
