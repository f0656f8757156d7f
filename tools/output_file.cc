// SPDX-License-Identifier: Apache-2.0
#include "tools/output_file.h"

#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <stdexcept>
#include <system_error>
#include <utility>

#include <fmt/format.h>
#include <unistd.h>

namespace winnow::tools {
namespace {

/// Where symbolic links lead to, also if nothing is there yet.
std::string behind_links(std::filesystem::path path) {
  constexpr int kMostLinks = 40;  // as in Linux
  std::error_code none;
  for (int i = 0; i < kMostLinks && is_symlink(path, none); ++i)
    path = path.parent_path() / read_symlink(path, none);
  return path;
}

}  // namespace

OutputFile::OutputFile(std::string path) : path_(std::move(path)) {
  if (path_.empty()) return;
  std::error_code unknown;  // then opening fails and says why
  const auto status = std::filesystem::status(path_, unknown);
  const bool is_special = exists(status) && !is_regular_file(status);
  if (!is_special) path_ = behind_links(path_);
  written_path_ = is_special ? path_ : fmt::format("{}.{}.part", path_, getpid());
  stream_.open(written_path_);
  check();
}

OutputFile::~OutputFile() {
  if (!path_.empty() && written_path_ != path_) std::remove(written_path_.c_str());
}

void OutputFile::close() {
  if (!is_open()) return;
  stream_.close();
  check();
  if (written_path_ == path_) return;
  if (std::rename(written_path_.c_str(), path_.c_str()) != 0) refuse(errno);
  written_path_ = path_;
}

void OutputFile::check() const {
  if (!stream_) refuse(errno);
}

void OutputFile::refuse(int error) const {
  throw std::runtime_error(
      fmt::format("cannot write '{}': {}", path_, std::generic_category().message(error)));
}

}  // namespace winnow::tools
