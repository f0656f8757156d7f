// SPDX-License-Identifier: Apache-2.0
#include "harness/score_pattern.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <span>
#include <utility>
#include <vector>

#include "harness/random.h"

namespace winnow::harness {
namespace {

/// Over how many rows a key of the case forgets; 0: keys are not alike.
std::int64_t memory_of(const Case& c) {
  return c.score_pattern == ScorePattern::smooth10     ? 10
         : c.score_pattern == ScorePattern::smooth1000 ? 1000
                                                       : 0;
}

bool is_in_cluster(const Case& c, std::int64_t key) {
  return c.score_pattern == ScorePattern::clusters && key % 3 == 0;
}

/// elements += factor * values of a line.
void add(const Values& values, std::int64_t line, double factor, std::span<double> elements) {
  std::vector<double> others(elements.size());
  values(line, others);
  for (std::size_t i = 0; i < others.size(); ++i) elements[i] += factor * others[i];
}

/// Values that pass from one independent line to the next over `memory` lines.
Values smooth(Values values, std::int64_t memory) {
  return [values = std::move(values), memory](std::int64_t line, std::span<double> elements) {
    const double passed = static_cast<double>(line % memory) / static_cast<double>(memory);
    std::fill(elements.begin(), elements.end(), 0.0);
    add(values, line / memory, 1 - passed, elements);
    add(values, line / memory + 1, passed, elements);
  };
}

}  // namespace

bool has_nan_keys(const Case& c) { return c.nan_keys || c.score_pattern == ScorePattern::half_nan; }

bool holds_nan(const Case& c, std::int64_t key) {
  if (c.score_pattern == ScorePattern::half_nan) return key % 2 == 1;
  return c.nan_keys && key % 5 == 2;
}

std::int64_t twin_of(const Case& c, std::int64_t key) {
  switch (c.score_pattern) {
    case ScorePattern::ties:
      return Random(1, "ties").below(key, 64);
    case ScorePattern::equal:
    case ScorePattern::zero_weights:
      return 0;
    default:
      return -1;
  }
}

double key_factor(const Case& c, std::int64_t key) {
  const std::int64_t keys = std::max<std::int64_t>(c.index_keys(), 1);
  // A power of the place, so that the first keys of recency are far below the last ones.
  const auto rising = [&](std::int64_t place) {
    const double part = static_cast<double>(place + 1) / static_cast<double>(keys);
    return part * part * part * part;
  };
  constexpr std::array kOfBlocks{1.0, 64.0, 0.015625, 8.0, 0.125, 512.0, 4.0, 0.25};
  switch (c.score_pattern) {
    case ScorePattern::recency:
      return rising(key);
    case ScorePattern::reversed:
      return rising(keys - 1 - key);
    case ScorePattern::outliers:
      return key < 64 ? 4 : 0.125;
    case ScorePattern::blocks:
      return kOfBlocks[key * std::ssize(kOfBlocks) / keys];
    default:
      return 1;
  }
}

Values patterned_keys(const Case& c, Values keys) {
  if (memory_of(c) > 0) return smooth(std::move(keys), memory_of(c));
  return [c, keys = std::move(keys)](std::int64_t line, std::span<double> elements) {
    const bool has_one_key =
        c.score_pattern == ScorePattern::equal || c.score_pattern == ScorePattern::last_bits;
    const bool has_ties = c.score_pattern == ScorePattern::ties;
    keys(has_one_key ? 0 : has_ties ? twin_of(c, line) : line, elements);
    if (is_in_cluster(c, line)) {
      for (double& element : elements) element *= 0.001;
      add(keys, 0, 3, elements);
    }
    // One element of a key moves by a step of bf16.
    if (c.score_pattern == ScorePattern::last_bits && line % 3 != 0)
      elements[Random(1, "last bits").below(line, std::ssize(elements))] *= 1 + 0x1p-7;
  };
}

Values patterned_queries(const Case& c, Values queries, Values keys) {
  if (memory_of(c) == 0) return queries;
  return [c, queries = std::move(queries), keys = std::move(keys)](std::int64_t line,
                                                                   std::span<double> elements) {
    queries(line, elements);
    // A query is like the key of its own row.
    const std::int64_t row = c.rows - c.tokens + line / c.index_heads;
    add(keys, std::max<std::int64_t>(row, 0) / c.ratio, 1, elements);
  };
}

Values patterned_weights(const Case& c, Values weights) {
  const bool has_zeros = c.score_pattern == ScorePattern::zero_weights;
  const bool has_one_sign =
      memory_of(c) > 0 || c.score_pattern == ScorePattern::recency ||
      c.score_pattern == ScorePattern::reversed || c.score_pattern == ScorePattern::one_sign ||
      c.score_pattern == ScorePattern::clusters || c.score_pattern == ScorePattern::last_bits;
  if (!has_zeros && !has_one_sign) return weights;
  return [has_zeros, weights = std::move(weights)](std::int64_t line, std::span<double> elements) {
    weights(line, elements);
    for (double& element : elements) element = has_zeros ? 0 : std::abs(element);
  };
}

}  // namespace winnow::harness
