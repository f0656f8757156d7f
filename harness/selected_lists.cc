// SPDX-License-Identifier: Apache-2.0
#include "harness/selected_lists.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "harness/random.h"
#include "winnow/index_topk.h"

namespace winnow::harness {
namespace {

constexpr std::int64_t kDim = 64;
constexpr double kMemory = 300;  // rows after which a key has forgotten most
constexpr double kNoise = 0.3;   // of queries

/// So few bits that scores are exact, whatever order they are summed in.
float rounded(double value) { return static_cast<float>(std::nearbyint(value * 32) / 32); }

/// [keys, kDim] of unit variance that forget exponentially.
std::vector<float> smooth_keys(std::uint64_t seed, std::int64_t keys) {
  const Random random(seed, "keys that select");
  const double kept = 1 - 1 / kMemory;
  const double renewed = std::sqrt(1 - kept * kept);
  std::array<double, kDim> key{};
  for (std::int64_t d = 0; d < kDim; ++d) key[d] = random.normal(d);
  std::vector<float> values;
  values.reserve(static_cast<std::size_t>(keys * kDim));
  for (std::int64_t s = 0; s < keys; ++s) {
    for (std::int64_t d = 0; d < kDim; ++d) {
      values.push_back(rounded(key[d]));
      key[d] = kept * key[d] + renewed * random.normal((s + 1) * kDim + d);
    }
  }
  return values;
}

}  // namespace

std::vector<std::int32_t> selected_lists(std::uint64_t seed, std::int64_t rows, std::int64_t keys,
                                         std::int64_t topk, std::int64_t ratio) {
  std::vector<std::int32_t> indices(static_cast<std::size_t>(rows * topk), -1);
  if (rows == 0 || keys == 0) return indices;
  std::vector<float> k = smooth_keys(seed, keys);
  const Random noise(seed, "noise of queries that select");
  std::vector<float> q;
  std::vector<std::int32_t> begin(static_cast<std::size_t>(rows), 0), end;
  for (std::int64_t t = 0; t < rows; ++t) {
    const std::int64_t own_key = std::max<std::int64_t>(keys - 1 - (rows - 1 - t) / ratio, 0);
    for (std::int64_t d = 0; d < kDim; ++d)
      q.push_back(rounded(k[own_key * kDim + d] + kNoise * noise.normal(t * kDim + d)));
    end.push_back(static_cast<std::int32_t>(own_key + 1));
  }
  std::vector<float> weights(static_cast<std::size_t>(rows), 1);
  index_topk_forward({.q = tensor_of(q, {rows, 1, kDim}),
                      .k = tensor_of(k, {keys, kDim}),
                      .weights = tensor_of(weights, {rows, 1}),
                      .begin = tensor_of(begin, {rows}),
                      .end = tensor_of(end, {rows}),
                      .indices = tensor_of(indices, {rows, topk})},
                     {.backend = Backend::cpu});
  return indices;
}

}  // namespace winnow::harness
