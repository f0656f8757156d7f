// SPDX-License-Identifier: Apache-2.0
// HelpFormatter: help texts in lines of at most 100 columns.
#pragma once

#include <initializer_list>
#include <sstream>
#include <string>

#include <CLI/CLI.hpp>

namespace winnow::tools {

class HelpFormatter : public CLI::Formatter {
 public:
  HelpFormatter() { column_width(kNames); }

  std::string make_option_opts(const CLI::Option* option) const override {
    if (!option->get_option_text().empty()) return " " + option->get_option_text();
    if (option->get_expected_max() == 0 || !option->nonpositional()) return "";  // a flag, OP
    return option->get_type_name().find("INT") != std::string::npos ? " N" : " NAME";
  }
  std::string make_option_desc(const CLI::Option* option) const override {
    return wrapped(option->get_description());
  }

 private:
  static constexpr std::size_t kNames = 20;
  static constexpr std::size_t kTexts = 100 - kNames;

  static std::string wrapped(const std::string& text) {
    std::istringstream words(text);
    std::string result;
    std::size_t column = 0;
    for (std::string word; words >> word;) {
      if (column > 0) {
        const bool fits = column + 1 + word.size() <= kTexts;
        result += fits ? ' ' : '\n';
        column = fits ? column + 1 : 0;
      }
      result += word;
      column += word.size();
    }
    return result;
  }
};

/// Ends the help of a command with lines that can be typed; each is what follows "winnow".
inline void add_examples(CLI::App& command, std::initializer_list<const char*> examples) {
  std::string text = "Examples:";
  for (const char* const example : examples) text += std::string("\n  winnow ") + example;
  command.footer(text);
}

}  // namespace winnow::tools
