// SPDX-License-Identifier: Apache-2.0
// A file of the safetensors format: eight bytes, the length of the header; the header; the tensors.
#include "tools/compare/safetensors.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <limits>
#include <system_error>
#include <utility>

#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tools/compare/safetensors_header.h"

namespace winnow::dump {
namespace {

constexpr std::uint64_t kLengthBytes = 8;
constexpr std::uint64_t kMostHeaderBytes = std::uint64_t{1} << 20;
constexpr std::size_t kMostShown = 60;

constexpr std::array<std::pair<std::string_view, DType>, 6> kTypes{{
    {"F32", DType::f32},
    {"BF16", DType::bf16},
    {"F16", DType::f16},
    {"F64", DType::f64},
    {"F8_E4M3", DType::f8_e4m3},
    {"I32", DType::i32},
}};

}  // namespace

std::string shown(std::string_view word) {
  std::string text = "'";
  for (const char c : word.substr(0, kMostShown)) {
    const bool printable = c >= ' ' && c <= '~';
    text += printable ? std::string(1, c) : fmt::format("\\x{:02x}", static_cast<unsigned char>(c));
  }
  return text + (word.size() > kMostShown ? "...'" : "'");
}

DType dtype_from_format(std::string_view name) {
  std::vector<std::string_view> names;
  for (const auto& [each, dtype] : kTypes) {
    if (each == name) return dtype;
    names.push_back(each);
  }
  throw FileError(fmt::format("dtype {}: must be one of {}", shown(name), fmt::join(names, ", ")));
}

std::string_view format_name(DType dtype) {
  return std::find_if(kTypes.begin(), kTypes.end(),
                      [&](const auto& each) { return each.second == dtype; })
      ->first;
}

std::uint64_t tensor_bytes(DType dtype, const std::vector<std::int64_t>& shape) {
  constexpr auto kMost = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
  // Strides are products of the other dimensions, also where one of 0 leaves no element.
  auto strides = static_cast<std::uint64_t>(element_bytes(dtype));
  bool has_elements = true;
  for (const std::int64_t size : shape) {
    if (size < 0 || static_cast<std::uint64_t>(size) > kMost / strides)
      throw FileError(fmt::format("shape [{}]: too large", fmt::join(shape, ", ")));
    strides *= static_cast<std::uint64_t>(std::max<std::int64_t>(size, 1));
    has_elements = has_elements && size > 0;
  }
  return has_elements ? strides : 0;
}

SafetensorsFile::SafetensorsFile(const std::string& path)
    : path_(path), descriptor_(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)) {
  if (descriptor_ < 0) refuse(std::generic_category().message(errno));
  try {
    struct stat status {};
    if (fstat(descriptor_, &status) != 0) refuse(std::generic_category().message(errno));
    if (!S_ISREG(status.st_mode)) refuse("is not a regular file");
    bytes_ = static_cast<std::uint64_t>(status.st_size);
    read_header();
    check_ranges();
  } catch (...) {  // there will be no destructor
    close(descriptor_);
    throw;
  }
}

SafetensorsFile::~SafetensorsFile() { close(descriptor_); }

void SafetensorsFile::refuse(const std::string& why) const {
  throw FileError(fmt::format("{}: {}", path_, why));
}

void SafetensorsFile::read_header() {
  if (bytes_ < kLengthBytes)
    refuse(fmt::format("{} bytes are no safetensors file: too few for a header", bytes_));
  std::array<std::byte, kLengthBytes> prefix{};
  read_at(0, prefix);
  std::uint64_t length = 0;
  for (std::size_t i = 0; i < kLengthBytes; ++i)
    length |= std::to_integer<std::uint64_t>(prefix[i]) << (8 * i);
  if (length > kMostHeaderBytes)
    refuse(fmt::format("a header of {} bytes: must be at most {}", length, kMostHeaderBytes));
  if (length > bytes_ - kLengthBytes)
    refuse(fmt::format("a header of {} bytes in a file of {}", length, bytes_));
  data_begin_ = kLengthBytes + length;
  std::string json(length, '\0');
  read_at(kLengthBytes, std::as_writable_bytes(std::span(json)));
  try {
    Header header = parse_header(json);
    tensors_ = std::move(header.tensors);
    metadata_ = std::move(header.metadata);
  } catch (const FileError& error) {
    refuse(error.what());
  }
}

void SafetensorsFile::check_ranges() const {
  const std::uint64_t data_bytes = bytes_ - data_begin_;
  std::vector<std::pair<const std::string*, const StoredTensor*>> by_place;
  for (const auto& [name, tensor] : tensors_) {
    if (tensor.begin > tensor.end || tensor.end > data_bytes)
      refuse(fmt::format("{} has data_offsets [{}, {}]: must ascend within the {} bytes of data",
                         shown(name), tensor.begin, tensor.end, data_bytes));
    std::uint64_t needed = 0;
    try {
      needed = tensor_bytes(tensor.dtype, tensor.shape);
    } catch (const FileError& error) {
      refuse(fmt::format("{} has {}", shown(name), error.what()));
    }
    if (needed != tensor.end - tensor.begin)
      refuse(fmt::format("{} has {} bytes: {} [{}] takes {}", shown(name),
                         tensor.end - tensor.begin, format_name(tensor.dtype),
                         fmt::join(tensor.shape, ", "), needed));
    by_place.emplace_back(&name, &tensor);
  }
  std::sort(by_place.begin(), by_place.end(), [](const auto& a, const auto& b) {
    return std::pair(a.second->begin, a.second->end) < std::pair(b.second->begin, b.second->end);
  });
  std::uint64_t done = 0;
  for (const auto& [name, tensor] : by_place) {
    if (tensor->begin < done) refuse(fmt::format("{} overlaps another tensor", shown(*name)));
    if (tensor->begin > done)
      refuse(fmt::format("{} bytes before {} belong to no tensor", tensor->begin - done,
                         shown(*name)));
    done = tensor->end;
  }
  if (done < data_bytes)
    refuse(fmt::format("the last {} bytes belong to no tensor", data_bytes - done));
}

void SafetensorsFile::read(const StoredTensor& tensor, std::span<std::byte> to) const {
  read_at(data_begin_ + tensor.begin, to.first(tensor.end - tensor.begin));
}

void SafetensorsFile::read_at(std::uint64_t offset, std::span<std::byte> to) const {
  while (!to.empty()) {
    const ssize_t got = pread(descriptor_, to.data(), to.size(), static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) refuse(std::generic_category().message(errno));
    if (got == 0) refuse("became shorter while it was read");
    to = to.subspan(static_cast<std::size_t>(got));
    offset += static_cast<std::uint64_t>(got);
  }
}

}  // namespace winnow::dump
