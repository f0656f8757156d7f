// SPDX-License-Identifier: Apache-2.0
// SafetensorsFile: the header of a file of the safetensors format, and the bytes of its tensors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "winnow/tensor.h"

namespace winnow::dump {

/// A file that is not what it should be; the sentence names the file.
class FileError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// A word of a file as it can be shown on a terminal: quoted, cut off where it is long, and without
/// control characters.
std::string shown(std::string_view word);

/// The type of this name in the format, "BF16"; throws FileError, which lists the names.
DType dtype_from_format(std::string_view name);
std::string_view format_name(DType dtype);

/// The bytes that a tensor takes; throws FileError if they, or strides of it, pass 2^63 - 1.
std::uint64_t tensor_bytes(DType dtype, const std::vector<std::int64_t>& shape);

inline constexpr std::size_t kMostDimensions = std::tuple_size_v<decltype(Tensor::shape)>;

struct StoredTensor {
  DType dtype = DType::f32;
  std::vector<std::int64_t> shape;  // at most kMostDimensions
  std::uint64_t begin = 0;          // of its bytes, behind the header
  std::uint64_t end = 0;
};

/// Reads and checks the header when it is made: nothing that the file says is believed. Every byte
/// behind the header belongs to exactly one tensor, as the format asks. Memory is taken for the
/// header alone, which may have a mebibyte.
class SafetensorsFile {
 public:
  /// Throws FileError for a file that cannot be read or is not of the format.
  explicit SafetensorsFile(const std::string& path);
  ~SafetensorsFile();
  SafetensorsFile(const SafetensorsFile&) = delete;
  SafetensorsFile& operator=(const SafetensorsFile&) = delete;

  const std::map<std::string, StoredTensor>& tensors() const { return tensors_; }
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  std::uint64_t bytes() const { return bytes_; }

  /// Reads the bytes of a tensor of this file, as many as `to` has.
  void read(const StoredTensor& tensor, std::span<std::byte> to) const;

 private:
  void read_header();
  void check_ranges() const;
  void read_at(std::uint64_t offset, std::span<std::byte> to) const;
  [[noreturn]] void refuse(const std::string& why) const;

  std::string path_;
  int descriptor_ = -1;
  std::uint64_t bytes_ = 0;       // of the file
  std::uint64_t data_begin_ = 0;  // where the header ends
  std::map<std::string, StoredTensor> tensors_;
  std::map<std::string, std::string> metadata_;
};

}  // namespace winnow::dump
