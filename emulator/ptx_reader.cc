// SPDX-License-Identifier: Apache-2.0
// PTX as text: words, numbers, declarations.
#include "emulator/ptx_reader.h"

#include <cctype>
#include <charconv>

#include "emulator/gpu.h"

namespace winnow::emulator {
namespace {

bool is_name(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '$' || c == '%';
}

std::vector<Declared> read_parameters(Reader& reader) {
  std::vector<Declared> parameters;
  if (!reader.take('(')) return parameters;
  while (!reader.take(')')) {
    reader.expect('.');
    reader.word();  // param
    parameters.push_back(read_declaration(reader));
    reader.take(',');
  }
  return parameters;
}

/// The numbers behind .maxntid and its like.
std::array<unsigned, 3> read_size(Reader& reader) {
  std::array<unsigned, 3> size{1, 1, 1};
  for (unsigned& each : size) {
    each = static_cast<unsigned>(reader.count());
    if (!reader.take(',')) break;
  }
  return size;
}

}  // namespace

bool Reader::take(char c) {
  if (peek() != c) return false;
  advance(1);
  return true;
}

void Reader::expect(char c) {
  if (!take(c)) fail(std::string("expected '") + c + "'");
}

std::string_view Reader::word(std::string_view others) {
  std::size_t end = at_;
  while (end < text_.size() &&
         (is_name(text_[end]) || others.find(text_[end]) != std::string_view::npos)) {
    ++end;
  }
  const std::string_view found = text_.substr(at_, end - at_);
  if (found.empty()) fail("expected a name");
  advance(found.size());
  return found;
}

std::size_t Reader::count() {
  const std::string_view digits = word();
  std::size_t value = 0;
  std::from_chars(digits.data(), digits.data() + digits.size(), value);
  return value;
}

std::string_view Reader::until(char c) {
  const std::size_t begin = at_;
  while (!ended() && peek() != c) advance(1);
  return since(begin);
}

void Reader::skip_line() {
  while (at_ < text_.size() && text_[at_] != '\n') ++at_;
  skip();
}

void Reader::skip_braces() {
  int depth = 0;
  do {
    if (ended()) fail("a brace is not closed");
    if (peek() == '{') ++depth;
    if (peek() == '}') --depth;
    advance(1);
  } while (depth > 0);
}

void Reader::fail(const std::string& what) const {
  throw PtxError("PTX, line " + std::to_string(line_) + ": " + what + " at \"" +
                 std::string(text_.substr(at_, 60)) + "\"");
}

void Reader::advance(std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) line_ += text_[at_ + i] == '\n';
  at_ += count;
  skip();
}

void Reader::skip() {
  while (at_ < text_.size()) {
    const char c = text_[at_];
    if (c == '\n') {
      ++line_;
      ++at_;
    } else if (c == ' ' || c == '\t' || c == '\r' || c == '\0') {
      ++at_;
    } else if (c == '/' && peek(1) == '/') {
      while (at_ < text_.size() && text_[at_] != '\n') ++at_;
    } else {
      break;
    }
  }
}

std::size_t bytes_of_type(std::string_view type) {
  if (type == "pred") return 0;
  if (type.substr(1) == "8") return 1;
  if (type.substr(1) == "16") return 2;
  if (type.substr(1) == "32") return 4;
  if (type.substr(1) == "64") return 8;
  throw PtxError("PTX: type " + std::string(type));
}

std::int64_t read_number(std::string_view text) {
  const bool negative = text.starts_with('-');
  if (negative) text.remove_prefix(1);
  std::uint64_t value = 0;
  const auto from = [&](std::size_t skip, int base) {
    std::from_chars(text.data() + skip, text.data() + text.size(), value, base);
  };
  if (text.size() > 2 && text[0] == '0' &&
      (text[1] == 'f' || text[1] == 'F' || text[1] == 'd' || text[1] == 'D' || text[1] == 'x' ||
       text[1] == 'X')) {
    from(2, 16);
  } else if (text.size() > 1 && text[0] == '0') {
    from(1, 8);
  } else {
    from(0, 10);
  }
  return negative ? -static_cast<std::int64_t>(value) : static_cast<std::int64_t>(value);
}

/// Reads the rest of a declaration, behind its state space.
Declared read_declaration(Reader& reader) {
  Declared declared;
  std::size_t element = 0;
  bool is_pointer = false;
  while (reader.take('.')) {
    const std::string_view word = reader.word();
    if (word == "align") {
      const std::size_t alignment = reader.count();
      if (!is_pointer) declared.alignment = alignment;
    } else if (word == "ptr") {
      is_pointer = true;  // an alignment behind it is that of what it points to
    } else if (word == "global" || word == "shared" || word == "const" || word == "visible" ||
               word == "weak" || word == "extern" || word == "common") {
      continue;
    } else {
      element = bytes_of_type(word);
    }
  }
  if (declared.alignment == 0) declared.alignment = element;
  declared.name = reader.word();
  declared.bytes = element;
  declared.element_bytes = element;
  while (reader.take('[')) {
    if (reader.take(']')) {
      declared.is_array_without_size = true;
      continue;
    }
    declared.bytes *= reader.count();
    reader.expect(']');
  }
  return declared;
}

NamedBody read_function(Reader& reader) {
  Body body;
  if (reader.peek() == '(') {
    const std::vector<Declared> results = read_parameters(reader);
    if (!results.empty()) body.result = results[0].name;
  }
  const std::string_view name = reader.word();
  body.parameters = read_parameters(reader);
  while (reader.take('.')) {
    const std::string_view directive = reader.word();
    if (directive == "maxntid" || directive == "reqntid") {
      const auto size = read_size(reader);
      body.max_threads = static_cast<int>(size[0] * size[1] * size[2]);
    } else if (directive == "reqnctapercluster") {
      body.cluster = read_size(reader);
    } else if (directive == "minnctapersm" || directive == "maxnreg" ||
               directive == "maxclusterrank") {
      reader.count();
    }
  }
  body.is_declared_only = reader.take(';');
  if (!body.is_declared_only) {
    body.at = reader.at();
    body.line = reader.line();
    reader.skip_braces();
  }
  return {name, std::move(body)};
}

}  // namespace winnow::emulator
