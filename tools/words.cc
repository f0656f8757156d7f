// SPDX-License-Identifier: Apache-2.0
// Words of the command line that name something.
#include "tools/words.h"

#include <algorithm>
#include <array>
#include <stdexcept>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "harness/backends.h"
#include "harness/workloads.h"
#include "winnow/error.h"

namespace winnow::tools {
namespace {

constexpr std::array kBackends{Backend::reference, Backend::cpu, Backend::cuda};
constexpr std::array<std::pair<std::string_view, harness::Slots>, 3> kSlots{{
    {"ascending", harness::Slots::ascending},
    {"shuffled", harness::Slots::shuffled},
    {"neighbours", harness::Slots::neighbours},
}};
constexpr std::array<std::pair<std::string_view, Sharding>, 2> kShardings{{
    {"contiguous", Sharding::contiguous},
    {"zigzag", Sharding::zigzag},
}};

[[noreturn]] void refuse(std::string_view what, const std::string& word,
                         const std::vector<std::string_view>& allowed) {
  throw std::invalid_argument(fmt::format("no {} '{}': there are {}", what, word, join(allowed)));
}

/// The value that `word` names in a table of words and values.
template <class Words>
auto value_of(std::string_view what, const std::string& word, const Words& words) {
  std::vector<std::string_view> names;
  for (const auto& [name, value] : words) {
    if (name == word) return value;
    names.push_back(name);
  }
  refuse(what, word, names);
}

}  // namespace

std::string join(const std::vector<std::string_view>& words, std::string_view separator) {
  return fmt::format("{}", fmt::join(words, separator));
}

std::vector<std::string_view> backend_names() {
  std::vector<std::string_view> names;
  for (const Backend backend : kBackends) names.push_back(name(backend));
  return names;
}

std::vector<std::string_view> model_names() {
  std::vector<std::string_view> names;
  for (const harness::Case& each : harness::cases())
    if (each.full) names.push_back(each.name);
  return names;
}

Backend backend_word(const std::string& word) {
  if (word.empty()) return harness::usable_backends().back();
  for (const Backend backend : kBackends) {
    if (name(backend) != word) continue;
    const std::string reason = why_not(backend);
    if (!reason.empty()) throw Error(ErrorCode::unsupported, reason);
    return backend;
  }
  refuse("backend", word, backend_names());
}

std::vector<std::string_view> op_words(const std::string& word) {
  const auto& all = harness::ops();
  std::vector<std::string_view> ops(all.begin(), all.end());
  if (word.empty()) return ops;
  const auto found = std::find(ops.begin(), ops.end(), word);
  if (found == ops.end()) refuse("operator", word, ops);
  return {*found};
}

const harness::Case& model_word(const std::string& word) {
  for (const harness::Case& each : harness::cases())
    if (each.full && each.name == word) return each;
  refuse("model", word, model_names());
}

harness::Slots slots_word(const std::string& word) {
  return value_of("order of slots", word, kSlots);
}

Sharding sharding_word(const std::string& word) { return value_of("sharding", word, kShardings); }

std::string_view name(Sharding sharding) {
  return std::find_if(kShardings.begin(), kShardings.end(),
                      [&](const auto& each) { return each.second == sharding; })
      ->first;
}

}  // namespace winnow::tools
