// SPDX-License-Identifier: Apache-2.0
// The norms by which gradients are judged.
#include "tools/compare/gradient_norms.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <limits>
#include <span>
#include <vector>

#include "harness/memory.h"
#include "harness/trial.h"
#include "harness/value_magnitudes.h"

namespace winnow::dump {
namespace {

using harness::Buffer;
using harness::kOracle;
using harness::Shape;
using harness::shape_of;

std::span<const double> values_of(const Tensor& tensor) {
  std::int64_t count = tensor ? 1 : 0;
  for (std::int32_t i = 0; i < tensor.rank; ++i) count *= tensor.shape[i];
  return {static_cast<const double*>(tensor.data), static_cast<std::size_t>(count)};
}

double norm_of(std::span<const double> values) {
  double sum = 0;
  for (const double value : values) sum += value * value;
  return std::sqrt(sum);
}

double product_of_magnitudes(std::span<const double> a, std::span<const double> b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += std::abs(a[i] * b[i]);
  return sum;
}

Buffer filled(const Shape& shape, std::span<const double> values) {
  Buffer buffer(Device{}, DType::f64, shape);
  buffer.upload(values);
  return buffer;
}

Buffer magnitudes_of(const Tensor& tensor) {
  return filled(shape_of(tensor), harness::magnitudes(values_of(tensor)));
}

/// A tensor whose lines are twice as long: what `in_front` makes of each element, then the
/// elements.
template <class InFront>
Buffer doubled(const Tensor& tensor, const InFront& in_front) {
  Shape shape = shape_of(tensor);
  const auto width = static_cast<std::size_t>(shape.back());
  shape.back() *= 2;
  const std::span<const double> values = values_of(tensor);
  std::vector<double> lines;
  for (std::size_t first = 0; first < values.size(); first += width) {
    const std::span<const double> line = values.subspan(first, width);
    std::transform(line.begin(), line.end(), std::back_inserter(lines), in_front);
    lines.insert(lines.end(), line.begin(), line.end());
  }
  return filled(shape, lines);
}

/// Of the first half of every line.
double norm_of_first_halves(const Buffer& buffer) {
  const auto width = static_cast<std::size_t>(shape_of(buffer.tensor()).back());
  const std::vector<double> values = buffer.download();
  double sum = 0;
  for (std::size_t i = 0; i < values.size(); ++i)
    if (i % width < width / 2) sum += values[i] * values[i];
  return std::sqrt(sum);
}

}  // namespace

Norms gradient_norms(const SparseAttentionBackward& args) {
  const bool batched = args.q.rank == 4;
  const std::int64_t slices = batched ? args.q.shape[0] : 1;
  const std::int64_t tokens = args.q.shape[batched];
  const std::int64_t heads = args.q.shape[batched + 1];
  const std::int64_t qk_dim = args.q.shape[batched + 2];
  const std::int64_t v_dim = args.out.shape[batched + 2];
  const std::int64_t keys = args.kv.shape[batched];
  const std::int64_t topk = args.indices.shape[batched + 1];
  const double scale = args.scale != 0 ? args.scale : 1 / std::sqrt(static_cast<double>(qk_dim));
  const auto* const indices = static_cast<const std::int32_t*>(args.indices.data);
  const auto* const lengths = static_cast<const std::int32_t*>(args.lengths.data);

  std::vector<double> d_q(values_of(args.q).size());
  std::vector<double> d_kv(values_of(args.kv).size());
  std::vector<double> d_sink(static_cast<std::size_t>(heads));
  for (std::int64_t at = 0; at < slices * tokens * heads; ++at) {
    const std::int64_t row = at / heads;
    const std::int64_t h = at % heads;
    const double lse = values_of(args.lse)[at];
    if (lse == -std::numeric_limits<double>::infinity()) continue;
    const double sink = args.sink ? values_of(args.sink)[h] : 0;
    const double total = args.sink ? harness::log_of_sum(lse, sink) : lse;
    const std::span q = values_of(args.q).subspan(at * qk_dim, qk_dim);
    const std::span d_out = values_of(args.d_out).subspan(at * v_dim, v_dim);
    const double delta =
        product_of_magnitudes(values_of(args.out).subspan(at * v_dim, v_dim), d_out);
    const double d_lse = args.d_lse ? std::abs(values_of(args.d_lse)[at]) : 0;
    if (args.sink && std::isfinite(total)) d_sink[h] += delta * std::exp(sink - total);
    const std::int64_t length =
        lengths == nullptr ? topk : std::min<std::int64_t>(topk, lengths[row]);
    for (std::int64_t j = 0; j < length; ++j) {
      const std::int64_t key = indices[row * topk + j];
      if (key < 0 || key >= keys) continue;
      const std::int64_t first = (row / tokens * keys + key) * qk_dim;
      const std::span kv = values_of(args.kv).subspan(first, qk_dim);
      double s = 0;
      for (std::int64_t d = 0; d < qk_dim; ++d) s += q[d] * kv[d];
      const double p = std::exp(scale * s - total);
      const double d_s = std::abs(scale) * (p * (product_of_magnitudes(d_out, kv) + delta) +
                                            std::exp(scale * s - lse) * d_lse);
      for (std::int64_t d = 0; d < qk_dim; ++d) {
        d_q[at * qk_dim + d] += d_s * std::abs(kv[d]);
        d_kv[first + d] += d_s * std::abs(q[d]);
      }
      for (std::int64_t d = 0; d < v_dim; ++d) d_kv[first + d] += p * std::abs(d_out[d]);
    }
  }
  return {{"d_q", norm_of(d_q)}, {"d_kv", norm_of(d_kv)}, {"d_sink", norm_of(d_sink)}};
}

Norms gradient_norms(const IndexTopkBackward& args) {
  // Channels in front of q and k that meet zeros leave the products, and with them the mask, as
  // they are, and get gradients of their own: sums over the magnitudes of the other side.
  const auto zero = [](double) { return 0.0; };
  const auto magnitude = [](double x) { return std::abs(x); };
  const Buffer weights = magnitudes_of(args.weights);
  const Buffer d_scores = magnitudes_of(args.d_scores);
  const Buffer d_weights(Device{}, DType::f64, shape_of(args.d_weights));
  IndexTopkBackward terms = args;
  terms.weights = weights.tensor();
  terms.d_scores = d_scores.tensor();
  terms.d_weights = d_weights.tensor();
  Norms norms;
  for (const bool of_q : {true, false}) {
    const Buffer q = of_q ? doubled(args.q, zero) : doubled(args.q, magnitude);
    const Buffer k = of_q ? doubled(args.k, magnitude) : doubled(args.k, zero);
    const Buffer d_q(Device{}, DType::f64, shape_of(q.tensor()));
    Buffer d_k(Device{}, DType::f64, shape_of(k.tensor()));
    d_k.upload(std::vector<double>(values_of(k.tensor()).size(), 0.0));
    terms.q = q.tensor();
    terms.k = k.tensor();
    terms.d_q = d_q.tensor();
    terms.d_k = d_k.tensor();
    run(terms, kOracle);
    norms[of_q ? "d_q" : "d_k"] = norm_of_first_halves(of_q ? d_q : d_k);
  }
  norms["d_weights"] = norm_of(d_weights.download());
  return norms;
}

Norms gradient_norms(const ValueProjectionBackward& args) {
  const Buffer out = magnitudes_of(args.out);
  const Buffer w_v = magnitudes_of(args.w_v);
  const Buffer d_out_v = magnitudes_of(args.d_out_v);
  const Buffer d_out(Device{}, DType::f64, shape_of(args.d_out));
  Buffer d_w_v(Device{}, DType::f64, shape_of(args.d_w_v));
  d_w_v.upload(std::vector<double>(values_of(args.d_w_v).size(), 0.0));
  run(ValueProjectionBackward{.out = out.tensor(),
                              .w_v = w_v.tensor(),
                              .d_out_v = d_out_v.tensor(),
                              .d_out = d_out.tensor(),
                              .d_w_v = d_w_v.tensor()},
      kOracle);
  return {{"d_out", norm_of(d_out.download())}, {"d_w_v", norm_of(d_w_v.download())}};
}

}  // namespace winnow::dump
