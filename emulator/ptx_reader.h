// SPDX-License-Identifier: Apache-2.0
// PTX as text: words, declarations, where functions stand.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace winnow::emulator {

inline std::size_t align_up(std::size_t value, std::size_t alignment) {
  return (value + alignment - 1) / alignment * alignment;
}

/// A place in PTX, past white space and comments.
class Reader {
 public:
  Reader(std::string_view text, std::size_t at, std::uint32_t line)
      : text_(text), at_(at), line_(line) {
    skip();
  }

  bool ended() const { return at_ >= text_.size(); }
  char peek(std::size_t ahead = 0) const {
    return at_ + ahead < text_.size() ? text_[at_ + ahead] : '\0';
  }
  std::size_t at() const { return at_; }
  std::uint32_t line() const { return line_; }
  std::string_view since(std::size_t begin) const { return text_.substr(begin, at_ - begin); }

  bool take(char c);
  void expect(char c);
  /// Letters, digits, _ $ % and those in `others`.
  std::string_view word(std::string_view others = "");
  /// A number without a sign.
  std::size_t count();
  /// Up to a character, which is not taken.
  std::string_view until(char c);
  /// Past the end of the line. What was read last must not have been the last on it.
  void skip_line();
  /// Past the brace that closes the one that is next.
  void skip_braces();
  [[noreturn]] void fail(const std::string& what) const;

 private:
  void advance(std::size_t count);
  void skip();

  std::string_view text_;
  std::size_t at_;
  std::uint32_t line_;
};

/// A number as PTX writes it; of a float, such as 0f3F800000, the bits.
std::int64_t read_number(std::string_view text);

/// The bytes of a fundamental type; 0 of predicates.
std::size_t bytes_of_type(std::string_view type);

/// A variable as it is declared: .param .align 8 .b8 name[200]
struct Declared {
  std::string_view name;
  std::size_t alignment = 0;
  std::size_t bytes = 0;
  std::size_t element_bytes = 0;
  bool is_array_without_size = false;
};

/// Reads the rest of a declaration, behind its state space.
Declared read_declaration(Reader& reader);

/// Where the text of a function stands, and what stands before it.
struct Body {
  std::size_t at = 0;
  std::uint32_t line = 0;
  std::vector<Declared> parameters;
  std::string_view result;  // its name
  int max_threads = 1024;
  std::array<unsigned, 3> cluster{1, 1, 1};
  bool is_declared_only = false;
};

/// Reads a function, behind .entry or .func, and goes past it.
struct NamedBody {
  std::string_view name;
  Body body;
};
NamedBody read_function(Reader& reader);

}  // namespace winnow::emulator
