// SPDX-License-Identifier: Apache-2.0
// Table: rows of words in columns, each as wide as its widest word.
#pragma once

#include <string>
#include <vector>

namespace winnow::tools {

class Table {
 public:
  /// One column a heading; a heading with a leading '<' is left-aligned, others are right-aligned.
  explicit Table(const std::vector<std::string>& headings);

  void add(std::vector<std::string> cells);
  /// Lines with their ends. Nothing trails a line.
  std::string text() const;

 private:
  std::vector<bool> left_;
  std::vector<std::vector<std::string>> rows_;
};

}  // namespace winnow::tools
