// SPDX-License-Identifier: Apache-2.0
// One call of an operator, read from a file.
#include "tools/compare/dumped_call.h"

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <limits>
#include <span>
#include <system_error>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tools/compare/safetensors.h"

namespace winnow::dump {
namespace {

// A few words can state a large output. It may take so many times the bytes of the file, and a
// mebibyte: an indexer of one narrow head that selects thousands of keys needs about a thousand.
constexpr std::uint64_t kMostTimesFile = 1024;
constexpr std::uint64_t kSmallOutputs = std::uint64_t{1} << 20;

template <class Number>
Number number_of(std::string_view text) {
  Number number{};
  const auto read = std::from_chars(text.data(), text.data() + text.size(), number);
  if (read.ec != std::errc{} || read.ptr != text.data() + text.size())
    throw FileError("must be a number");
  return number;
}

double option_value(const FormatField& field, std::string_view text) {
  switch (field.option) {
    case OptionKind::whole_number:
      return number_of<std::int32_t>(text);
    case OptionKind::number:
      return static_cast<double>(number_of<float>(text));
    case OptionKind::truth:
      if (text != "true" && text != "false") throw FileError("must be true or false");
      return text == "true" ? 1 : 0;
    default: {
      const auto found = std::find(field.words.begin(), field.words.end(), text);
      if (found == field.words.end())
        throw FileError(fmt::format("must be one of {}", fmt::join(field.words, ", ")));
      return static_cast<double>(found - field.words.begin());
    }
  }
}

/// "BF16[4096, 64, 512]"
TypeAndShape type_and_shape(std::string_view text) {
  const std::size_t bracket = text.find('[');
  if (bracket == std::string_view::npos || !text.ends_with(']'))
    throw FileError("must be a type and a shape, as in BF16[4096, 64, 512]");
  TypeAndShape result{dtype_from_format(text.substr(0, bracket)), {}};
  text = text.substr(bracket + 1, text.size() - bracket - 2);
  while (!text.empty()) {
    const std::size_t end = std::min(text.find(','), text.size());
    result.shape.push_back(number_of<std::int64_t>(text.substr(0, end)));
    text.remove_prefix(std::min(end + 1, text.size()));
    text.remove_prefix(text.starts_with(' ') ? 1 : 0);
  }
  if (result.shape.size() > kMostDimensions)
    throw FileError(fmt::format("must have at most {} dimensions", kMostDimensions));
  return result;
}

class CallReader {
 public:
  explicit CallReader(const std::string& path) : path_(path), file_(path) {}

  DumpedCall read() {
    read_operator();
    for (const auto& [key, text] : file_.metadata()) read_metadata(key, text);
    read_roles();
    for (const auto& [name, tensor] : file_.tensors()) check_tensor(name, tensor);
    check_outputs();
    for (const auto& [name, tensor] : file_.tensors()) read_tensor(name, tensor);
    return std::move(call_);
  }

 private:
  [[noreturn]] void refuse(const std::string& why) const {
    throw FileError(fmt::format("{}: {}", path_, why));
  }

  void read_operator() {
    const auto found = file_.metadata().find(std::string(kOperatorKey));
    if (found == file_.metadata().end())
      refuse(fmt::format("its metadata has no {}: it is no dump of a call", kOperatorKey));
    call_.fields = format_of(found->second);
    if (call_.fields.empty())
      refuse(fmt::format("{} {}: must be one of {}", kOperatorKey, shown(found->second),
                         fmt::join(operator_names(), ", ")));
    call_.op = found->second;
  }

  const FormatField* find(std::string_view name) const {
    const auto found = std::find_if(call_.fields.begin(), call_.fields.end(),
                                    [&](const FormatField& field) { return field.name == name; });
    return found == call_.fields.end() ? nullptr : &*found;
  }

  void read_metadata(const std::string& key, const std::string& text) {
    const auto others = std::span(kOtherKeys);
    if (key == kOperatorKey || std::find(others.begin(), others.end(), key) != others.end()) return;
    if (key == kRanOnKey) {
      const std::string quoted = shown(text);
      call_.ran_on = quoted.substr(1, quoted.size() - 2);
      return;
    }
    const FormatField* const field = find(key);
    if (field == nullptr || field->role == FieldRole::input) {
      std::vector<std::string_view> known(others.begin(), others.end());
      for (const FormatField& each : call_.fields)
        if (each.role != FieldRole::input) known.push_back(each.name);
      refuse(fmt::format("metadata {}: {} has {}", shown(key), call_.op, fmt::join(known, ", ")));
    }
    try {
      if (field->role == FieldRole::option)
        call_.options[key] = option_value(*field, text);
      else
        call_.outputs[key] = type_and_shape(text);
    } catch (const FileError& error) {
      refuse(fmt::format("metadata {} is {}: {}", shown(key), shown(text), error.what()));
    }
  }

  /// What a call reads although its struct lists it among the outputs.
  void read_roles() {
    const auto given = [&](const char* option) {
      const auto found = call_.options.find(option);
      return found != call_.options.end() && found->second != 0;
    };
    if (given("accumulate"))
      refuse("metadata 'accumulate': must be false, as a dump holds the terms of its own call");
    for (FormatField& field : call_.fields) {
      const bool replayed = given("replay") && (field.name == "indices" || field.name == "lengths");
      if (!replayed && !(given("lse_given") && field.name == "lse")) continue;
      field.role = FieldRole::input;
      call_.outputs.erase(std::string(field.name));
    }
  }

  void check_tensor(const std::string& name, const StoredTensor& stored) {
    const FormatField* const field = find(name);
    if (field == nullptr || field->role == FieldRole::option) {
      std::vector<std::string_view> known;
      for (const FormatField& each : call_.fields)
        if (each.role != FieldRole::option) known.push_back(each.name);
      refuse(fmt::format("tensor {}: {} has {}", shown(name), call_.op, fmt::join(known, ", ")));
    }
    if (stored.shape.empty()) refuse(fmt::format("tensor {}: has no dimensions", shown(name)));
    if (field->role == FieldRole::output) call_.outputs[name] = {stored.dtype, stored.shape};
  }

  void read_tensor(const std::string& name, const StoredTensor& stored) {
    harness::Buffer buffer(Device{}, stored.dtype, stored.shape);
    file_.read(stored, std::span(static_cast<std::byte*>(buffer.tensor().data),
                                 static_cast<std::size_t>(stored.end - stored.begin)));
    call_.tensors.emplace(name, std::move(buffer));
  }

  /// Stored or stated.
  void check_outputs() const {
    const std::uint64_t most = kMostTimesFile * std::min(file_.bytes(), std::uint64_t{1} << 52);
    std::uint64_t bytes = 0;
    for (const auto& [name, output] : call_.outputs) {
      try {
        const std::uint64_t more = tensor_bytes(output.dtype, output.shape);
        if (more > most + kSmallOutputs - bytes)
          throw FileError(fmt::format("too large for a file of {} bytes", file_.bytes()));
        bytes += more;
      } catch (const FileError& error) {
        refuse(fmt::format("output {}: {}", shown(name), error.what()));
      }
    }
  }

  std::string path_;
  SafetensorsFile file_;
  DumpedCall call_;
};

}  // namespace

DumpedCall read_call(const std::string& path) { return CallReader(path).read(); }

}  // namespace winnow::dump
