// SPDX-License-Identifier: Apache-2.0
// Table: rows of words in columns.
#include "tools/table.h"

#include <algorithm>
#include <cassert>

#include <fmt/format.h>

namespace winnow::tools {

Table::Table(const std::vector<std::string>& headings) {
  std::vector<std::string>& first = rows_.emplace_back();
  for (const std::string& heading : headings) {
    left_.push_back(heading.starts_with('<'));
    first.push_back(left_.back() ? heading.substr(1) : heading);
  }
}

void Table::add(std::vector<std::string> cells) {
  assert(cells.size() == left_.size());
  rows_.push_back(std::move(cells));
}

std::string Table::text() const {
  std::vector<std::size_t> widths(left_.size(), 0);
  for (const auto& row : rows_)
    for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());

  std::string text;
  for (const auto& row : rows_) {
    std::string line;
    for (std::size_t i = 0; i < row.size(); ++i) {
      line += i > 0 ? "  " : "";
      line += left_[i] ? fmt::format("{:<{}}", row[i], widths[i])
                       : fmt::format("{:>{}}", row[i], widths[i]);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + '\n';
  }
  return text;
}

}  // namespace winnow::tools
