// SPDX-License-Identifier: Apache-2.0
// The JSON at the head of a safetensors file, read event by event: a document of values, as the
// parser would make it, takes many times the memory of its text and forgets names that stand twice.
#include "tools/compare/safetensors_header.h"

#include <cstdint>
#include <limits>
#include <set>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

namespace winnow::dump {
namespace {

constexpr std::size_t kOffsets = 2;
constexpr std::string_view kMetadata = "__metadata__";

/// Takes the events of nlohmann::json::sax_parse; every function but `parse_error` goes on or
/// throws.
class HeaderEvents {
 public:
  Header header;

  bool null() { return refuse_value("null"); }
  bool boolean(bool) { return refuse_value("a truth value"); }
  bool number_float(double, const std::string&) { return refuse_value("a number with a fraction"); }
  bool number_integer(std::int64_t) { return refuse_value("a negative number"); }
  bool binary(std::vector<std::uint8_t>&) { return refuse_value("binary data"); }

  bool number_unsigned(std::uint64_t value) {
    if (place_ == Place::shape) {
      if (numbers_.size() == kMostDimensions)
        refuse(fmt::format("has more than {} dimensions", kMostDimensions));
      if (value > std::numeric_limits<std::int64_t>::max())
        refuse(fmt::format("has a dimension of {}", value));
    } else if (place_ != Place::offsets) {
      return refuse_value("a number");
    } else if (numbers_.size() == kOffsets) {
      refuse("has more than two data_offsets");
    }
    numbers_.push_back(value);
    return true;
  }

  bool string(std::string& value) {
    if (place_ == Place::metadata) {
      header.metadata.emplace(key_, std::move(value));
    } else if (place_ == Place::tensor && key_ == "dtype") {
      tensor_.dtype = dtype_from_format(value);
    } else {
      return refuse_value("a string");
    }
    return true;
  }

  bool start_object(std::size_t) {
    if (place_ == Place::outside) {
      place_ = Place::file;
    } else if (place_ == Place::file) {
      place_ = name_ == kMetadata ? Place::metadata : Place::tensor;
      keys_.clear();
      tensor_ = {};
    } else {
      return refuse_value("an object");
    }
    return true;
  }

  bool key(std::string& word) {
    if (place_ == Place::file) {
      if (!names_.insert(word).second)
        throw FileError(fmt::format("the name {} stands twice", shown(word)));
      name_ = std::move(word);
      return true;
    }
    if (!keys_.insert(word).second) refuse(fmt::format("has {} twice", shown(word)));
    if (place_ == Place::tensor && word != "dtype" && word != "shape" && word != "data_offsets")
      refuse(fmt::format("has {}: there are dtype, shape and data_offsets", shown(word)));
    key_ = std::move(word);
    return true;
  }

  bool end_object() {
    if (place_ == Place::tensor) {
      for (const char* const needed : {"dtype", "shape", "data_offsets"})
        if (!keys_.contains(needed)) refuse(fmt::format("has no {}", needed));
      header.tensors.emplace(name_, std::move(tensor_));
    }
    place_ = place_ == Place::file ? Place::outside : Place::file;
    return true;
  }

  bool start_array(std::size_t) {
    if (place_ != Place::tensor || key_ == "dtype") return refuse_value("a list");
    place_ = key_ == "shape" ? Place::shape : Place::offsets;
    numbers_.clear();
    return true;
  }

  bool end_array() {
    if (place_ == Place::shape) {
      tensor_.shape.assign(numbers_.begin(), numbers_.end());
    } else {
      if (numbers_.size() != kOffsets) refuse("has fewer than two data_offsets");
      tensor_.begin = numbers_[0];
      tensor_.end = numbers_[1];
    }
    place_ = Place::tensor;
    return true;
  }

  bool parse_error(std::size_t position, const std::string&, const nlohmann::json::exception&) {
    throw FileError(fmt::format("the header is no JSON at byte {}", position));
  }

 private:
  enum class Place { outside, file, metadata, tensor, shape, offsets };

  [[noreturn]] void refuse(const std::string& why) const {
    throw FileError(fmt::format("{} {}", shown(name_), why));
  }
  [[noreturn]] bool refuse_value(std::string_view what) const {
    if (place_ == Place::outside)
      throw FileError(fmt::format("the header is {}: must be an object", what));
    if (place_ == Place::file)
      throw FileError(fmt::format("{} is {}: must be an object", shown(name_), what));
    refuse(fmt::format("has {} for {}", what, shown(key_)));
  }

  Place place_ = Place::outside;
  std::set<std::string, std::less<>> names_;  // of the file
  std::string name_;                          // of the entry that is being read
  std::set<std::string, std::less<>> keys_;   // of that entry
  std::string key_;
  std::vector<std::uint64_t> numbers_;  // of the list that is being read
  StoredTensor tensor_;
};

}  // namespace

Header parse_header(std::string_view json) {
  HeaderEvents events;
  nlohmann::json::sax_parse(json, &events);
  return std::move(events.header);
}

}  // namespace winnow::dump
