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

#include "tools/output.h"

namespace winnow::tools {
namespace {

/// Where a path leads to.
struct Destination {
  std::string path;       // behind symbolic links, also if nothing is there yet
  int descriptor = -1;    // of a stream of this program, such as /dev/stdout or /dev/fd/63
  bool is_plain = false;  // a regular file, or nothing yet
};

Destination destination(std::filesystem::path path) {
  constexpr int kMostLinks = 40;  // as in Linux
  std::error_code none;           // then opening fails and says why
  const auto status = std::filesystem::status(path, none);
  const auto streams = std::filesystem::canonical("/proc/self/fd", none);
  for (int i = 0; i < kMostLinks && is_symlink(path, none); ++i) {
    const auto folder = canonical(path.parent_path(), none);
    if (!streams.empty() && folder == streams) return {path, std::stoi(path.filename())};
    path = path.parent_path() / read_symlink(path, none);
  }
  return {path, -1, !exists(status) || is_regular_file(status)};
}

}  // namespace

OutputFile::OutputFile(std::string path) : path_(std::move(path)) {
  if (path_.empty()) return;
  const Destination found = destination(path_);
  if (found.descriptor >= 0) {
    const int copy = dup(found.descriptor);
    if (copy >= 0) file_ = fdopen(copy, "w");
  } else {
    if (found.is_plain) {
      path_ = found.path;
      written_path_ = fmt::format("{}.{}.part", path_, getpid());
    }
    file_ = std::fopen((found.is_plain ? written_path_ : path_).c_str(), "w");
  }
  if (file_ == nullptr) refuse();
}

OutputFile::~OutputFile() {
  if (file_ != nullptr) std::fclose(file_);
  if (!written_path_.empty()) std::remove(written_path_.c_str());
}

void OutputFile::close() {
  if (!is_open()) return;
  if (written_path_.empty()) flush_output();  // comes first where both are one file
  const bool written = std::fwrite(text_.data(), 1, text_.size(), file_) == text_.size();
  if (!written || std::fflush(file_) != 0) refuse();
  if (std::fclose(std::exchange(file_, nullptr)) != 0) refuse();
  if (written_path_.empty()) return;
  if (std::rename(written_path_.c_str(), path_.c_str()) != 0) refuse();
  written_path_.clear();
}

void OutputFile::refuse() const {
  throw std::runtime_error(
      fmt::format("cannot write '{}': {}", path_, std::generic_category().message(errno)));
}

}  // namespace winnow::tools
