// SPDX-License-Identifier: Apache-2.0
// whole_number: what an option of the command line that counts something may be given.
#pragma once

#include <charconv>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <system_error>

#include <CLI/CLI.hpp>
#include <fmt/format.h>

namespace winnow::tools {

/// For Option::transform: a decimal number from `least` to `most`. CLI11 itself reads 010 as octal,
/// takes -1 for the largest unsigned number and the largest for all past it.
template <class Number>
CLI::Validator whole_number(Number least, Number most) {
  const auto judge = [=](std::string& word) -> std::string {
    const std::string_view digits = std::string_view(word).substr(word.starts_with('-') ? 1 : 0);
    if (digits.empty() || digits.find_first_not_of("0123456789") != std::string_view::npos)
      return fmt::format("'{}' is not a whole number", word);
    Number number{};
    const auto read = std::from_chars(word.data(), word.data() + word.size(), number);
    if (read.ec != std::errc{} || number < least || number > most)
      return fmt::format("{} is not from {} to {}", word, least, most);
    word = fmt::to_string(number);  // without leading zeros
    return {};
  };
  return CLI::Validator(judge, "");
}

/// For the seed of a generator.
inline CLI::Validator any_seed() {
  return whole_number(std::uint64_t{0}, std::numeric_limits<std::uint64_t>::max());
}

}  // namespace winnow::tools
