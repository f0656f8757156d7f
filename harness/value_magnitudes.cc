// SPDX-License-Identifier: Apache-2.0
#include "harness/value_magnitudes.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <limits>
#include <numeric>
#include <span>

namespace winnow::harness {
namespace {

/// The elements of a slice of the batch, if there is one, and in it from these indices on.
template <class T>
const T* at(const Tensor& tensor, bool batched, std::int64_t slice,
            std::initializer_list<std::int64_t> indices) {
  const T* element = static_cast<const T*>(tensor.data);
  std::int32_t i = 0;
  if (batched) element += slice * tensor.stride[i++];
  for (const std::int64_t index : indices) element += index * tensor.stride[i++];
  return element;
}

}  // namespace

double log_of_sum(double lse, double sink) {
  const double largest = std::max(lse, sink);
  if (std::isinf(largest)) return largest;
  return largest + std::log(std::exp(lse - largest) + std::exp(sink - largest));
}

std::vector<double> value_magnitudes(const SparseAttentionForward& args, std::int64_t head_step) {
  const bool batched = args.q.rank == 4;
  const std::int64_t slices = batched ? args.q.shape[0] : 1;
  const std::int64_t tokens = args.q.shape[batched];
  const std::int64_t heads = args.q.shape[batched + 1];
  const std::int64_t qk_dim = args.q.shape[batched + 2];
  const std::int64_t keys = args.kv.shape[batched];
  const std::int64_t topk = args.indices.shape[batched + 1];
  const std::int64_t v_dim = args.out.shape[batched + 2];
  const double scale = args.scale != 0 ? args.scale : 1 / std::sqrt(static_cast<double>(qk_dim));

  std::vector<double> sums(slices * tokens * heads * v_dim,
                           std::numeric_limits<double>::infinity());
  for (std::int64_t row = 0; row < slices * tokens; ++row) {
    const std::int64_t slice = row / tokens;
    const std::int64_t t = row % tokens;
    const auto* const indices = at<std::int32_t>(args.indices, batched, slice, {t});
    const std::int64_t length =
        args.lengths
            ? std::min<std::int64_t>(topk, at<std::int32_t>(args.lengths, batched, slice, {})[t])
            : topk;
    for (std::int64_t h = 0; h < heads; h += head_step) {
      const auto* const q = at<double>(args.q, batched, slice, {t, h});
      double total = at<double>(args.lse, batched, slice, {t})[h];
      if (args.sink) total = log_of_sum(total, static_cast<const double*>(args.sink.data)[h]);
      const std::span sum = std::span(sums).subspan((row * heads + h) * v_dim, v_dim);
      std::fill(sum.begin(), sum.end(), 0.0);
      for (std::int64_t j = 0; j < length; ++j) {
        if (indices[j] < 0 || indices[j] >= keys) continue;
        const auto* const key = at<double>(args.kv, batched, slice, {indices[j]});
        const double p = std::exp(scale * std::inner_product(key, key + qk_dim, q, 0.0) - total);
        for (std::int64_t d = 0; d < v_dim; ++d) sum[d] += p * std::abs(key[d]);
      }
    }
  }
  return sums;
}

}  // namespace winnow::harness
