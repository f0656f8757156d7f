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
#include "harness/families.h"
#include "winnow/winnow.h"

namespace winnow::tools {
namespace {

constexpr std::array kBackends{Backend::reference, Backend::cpu, Backend::cuda};
constexpr std::array<std::pair<std::string_view, harness::Slots>, 4> kSlots{{
    {"ascending", harness::Slots::ascending},
    {"shuffled", harness::Slots::shuffled},
    {"neighbours", harness::Slots::neighbours},
    {"selected", harness::Slots::selected},
}};
constexpr std::array<std::pair<std::string_view, harness::ScorePattern>, 14> kScorePatterns{{
    {"iid", harness::ScorePattern::independent},
    {"smooth10", harness::ScorePattern::smooth10},
    {"smooth1000", harness::ScorePattern::smooth1000},
    {"recency", harness::ScorePattern::recency},
    {"reversed", harness::ScorePattern::reversed},
    {"outliers", harness::ScorePattern::outliers},
    {"ties", harness::ScorePattern::ties},
    {"blocks", harness::ScorePattern::blocks},
    {"equal", harness::ScorePattern::equal},
    {"zero-weights", harness::ScorePattern::zero_weights},
    {"half-nan", harness::ScorePattern::half_nan},
    {"one-sign", harness::ScorePattern::one_sign},
    {"clusters", harness::ScorePattern::clusters},
    {"last-bits", harness::ScorePattern::last_bits},
}};
constexpr std::array<std::pair<std::string_view, Sharding>, 2> kShardings{{
    {"contiguous", Sharding::contiguous},
    {"zigzag", Sharding::zigzag},
}};

[[noreturn]] void refuse(std::string_view what, const std::string& word,
                         const std::vector<std::string_view>& allowed) {
  throw std::invalid_argument(fmt::format("no {} '{}': there are {}", what, word, join(allowed)));
}

template <class Words>
std::vector<std::string_view> names_of(const Words& words) {
  std::vector<std::string_view> names;
  for (const auto& [name, value] : words) names.push_back(name);
  return names;
}

/// The value that `word` names in a table of words and values.
template <class Words>
auto value_of(std::string_view what, const std::string& word, const Words& words) {
  for (const auto& [name, value] : words)
    if (name == word) return value;
  refuse(what, word, names_of(words));
}

void add_new(std::vector<std::string_view>& names, const std::vector<std::string_view>& more) {
  for (const std::string_view name : more)
    if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
}

}  // namespace

std::string join(const std::vector<std::string_view>& words, std::string_view separator) {
  return fmt::format("{}", fmt::join(words, separator));
}

std::string case_help() {
  return fmt::format(
      "One of {} or any other case of check. Default: {}, or {} where that lacks the operator.",
      join(model_names()), kDefaultCase, kDefaultCaseWithWindow);
}

std::vector<std::string_view> backend_names() {
  std::vector<std::string_view> names;
  for (const Backend backend : kBackends) names.push_back(name(backend));
  return names;
}

std::vector<std::string_view> kernel_names(const std::vector<std::string_view>& ops,
                                           Backend backend) {
  std::vector<std::string_view> names;
  for (const std::string_view op : ops) add_new(names, harness::kernels_of(op, backend));
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

const harness::Case& case_word(const std::string& word, std::string_view op) {
  const harness::Case& first = harness::find_case(word.empty() ? kDefaultCase : word);
  const std::string reason = harness::missing(op, first);
  if (reason.empty()) return first;
  if (!word.empty()) throw std::invalid_argument(reason);
  return harness::find_case(kDefaultCaseWithWindow);
}

const char* kernel_word(const std::string& word, const std::vector<std::string_view>& ops,
                        const std::vector<Backend>& backends) {
  if (word.empty()) return nullptr;
  std::vector<std::string_view> names;
  std::vector<std::string_view> places;
  for (const Backend backend : backends) {
    add_new(names, kernel_names(ops, backend));
    places.push_back(name(backend));
  }
  if (std::find(names.begin(), names.end(), word) != names.end()) return word.c_str();
  throw std::invalid_argument(
      fmt::format("no kernel '{}' on {}: there are {}", word, join(places), join(names)));
}

const harness::Case& model_word(const std::string& word) {
  for (const harness::Case& each : harness::cases())
    if (each.full && each.name == word) return each;
  refuse("model", word, model_names());
}

harness::Slots slots_word(const std::string& word) {
  return value_of("order of slots", word, kSlots);
}

harness::ScorePattern score_pattern_word(const std::string& word) {
  return value_of("data of the indexer", word, kScorePatterns);
}
std::vector<std::string_view> score_pattern_names() { return names_of(kScorePatterns); }
std::vector<std::string_view> slots_names() { return names_of(kSlots); }
std::vector<std::string_view> sharding_names() { return names_of(kShardings); }

Sharding sharding_word(const std::string& word) { return value_of("sharding", word, kShardings); }

std::string_view name(Sharding sharding) {
  return std::find_if(kShardings.begin(), kShardings.end(),
                      [&](const auto& each) { return each.second == sharding; })
      ->first;
}

}  // namespace winnow::tools
