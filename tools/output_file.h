// SPDX-License-Identifier: Apache-2.0
// OutputFile: a file that is written whole or not at all.
#pragma once

#include <cstdio>
#include <string>

namespace winnow::tools {

/// The path is tried when this is made, before anything is measured. The text goes to a file beside
/// it, which takes its name in `close`: what had the name before stays until then, and stays if the
/// program ends earlier; if it is ended at once, as by a second Ctrl-C, FILE.PID.part stays. Links
/// are followed. A device, a pipe, or an open stream such as /dev/stdout gets the text in `close`,
/// after what was printed before; the file behind such a stream is not replaced.
class OutputFile {
 public:
  /// An empty path opens no file. Throws std::runtime_error if it cannot be written.
  explicit OutputFile(std::string path);
  ~OutputFile();
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;

  bool is_open() const { return file_ != nullptr; }
  void write(const std::string& text) { text_ += text; }
  /// Throws if something of the text was not written.
  void close();

 private:
  [[noreturn]] void refuse() const;

  std::string path_;
  std::string written_path_;  // until it gets the name; empty: written to directly
  std::string text_;
  std::FILE* file_ = nullptr;
};

}  // namespace winnow::tools
