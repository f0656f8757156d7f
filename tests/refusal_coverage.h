// SPDX-License-Identifier: Apache-2.0
// Records which refusal messages of the library the tests of this program have seen.
#pragma once

#include <algorithm>
#include <cstddef>
#include <set>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include <fmt/format.h>

#include "core/refusals.h"
#include "winnow/operators.h"

namespace winnow::tests {

class RefusalCoverage {
 public:
  /// Records a message "op: argument given: sentence" or "op: the x backend's kernel y sentence;
  /// ...". If several sentences match, the one with the most literal text counts.
  void record(std::string_view text) {
    for (std::size_t first = 0; first <= text.size();) {
      const std::size_t last = std::min(text.find("; ", first), text.size());
      record_one(text.substr(first, last - first));
      first = last + 2;
    }
  }

  std::vector<std::string> missing() const {
    std::vector<std::string> result;
    for (const char* sentence : refusal::all)
      if (!seen_.contains(sentence)) result.emplace_back(sentence);
    return result;
  }

 private:
  static std::size_t own_letters(std::string_view sentence) {
    std::size_t count = sentence.size();
    for (std::size_t at = sentence.find("{}"); at != std::string_view::npos;
         at = sentence.find("{}", at + 2))
      count -= 2;
    return count;
  }

  /// Whether `text` is `sentence` with anything but ": " in place of each {}.
  static bool matches(std::string_view text, std::string_view sentence) {
    const std::size_t gap = sentence.find("{}");
    if (gap == std::string_view::npos) return text == sentence;
    if (!text.starts_with(sentence.substr(0, gap))) return false;
    const std::string_view rest = sentence.substr(gap + 2);
    for (std::size_t end = gap; end <= text.size(); ++end) {
      if (matches(text.substr(end), rest)) return true;
      if (text.substr(end).starts_with(": ")) break;
    }
    return false;
  }

  void record_one(std::string_view text) {
    // The sentence is a suffix of the text, after a colon or after the name of a backend or kernel.
    const char* best = nullptr;
    for (const char* sentence : refusal::all) {
      for (const std::string& before : before_sentences_) {
        for (std::size_t at = text.find(before); at != std::string_view::npos;
             at = text.find(before, at + 1)) {
          if (!matches(text.substr(at + before.size()), sentence)) continue;
          if (best == nullptr || own_letters(sentence) > own_letters(best)) best = sentence;
        }
      }
    }
    if (best != nullptr) seen_.insert(best);
  }

  static std::set<std::string> all_before_sentences() {
    std::set<std::string> all = {": ", " backend "};
    for_each_operator([&]<class Args>(std::type_identity<Args>) {
      for (const Backend backend : {Backend::reference, Backend::cpu, Backend::cuda})
        for (const std::string_view kernel : kernels<Args>(backend))
          all.insert(fmt::format(" kernel {} ", kernel));
    });
    return all;
  }

  std::set<std::string> before_sentences_ = all_before_sentences();
  std::set<std::string_view> seen_;
};

}  // namespace winnow::tests
