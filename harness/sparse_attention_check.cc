// SPDX-License-Identifier: Apache-2.0
// The check of sparse_attention.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "harness/sparse_attention.h"
#include "harness/trial.h"

namespace winnow::harness {
namespace {

constexpr std::int64_t kHeadStep = 16;

double log_of_sum(double lse, double sink) {
  const double largest = std::max(lse, sink);
  if (std::isinf(largest)) return largest;
  return largest + std::log(std::exp(lse - largest) + std::exp(sink - largest));
}

/// sum_j p_j |v_j| of every element of out. At full size only some heads are measured element by
/// element; the others get infinity, a unit in which no error counts.
std::vector<double> sums_of_magnitudes(const Case& c, const SparseAttentionWork& oracle,
                                       const Rows& rows) {
  const std::vector<double> q = oracle.q.download();
  const std::vector<double> kv = oracle.kv.download();
  const std::vector<double> lse = oracle.lse.download();
  const std::vector<double> sink = oracle.sink.download();
  const auto held_rows = static_cast<std::int64_t>(lse.size()) / c.heads;
  std::vector<double> sums(held_rows * c.heads * c.v_dim, std::numeric_limits<double>::infinity());
  for (std::int64_t row = 0; row < held_rows; ++row) {
    // With a batch all rows are held, those of one slice after those of another.
    const std::int64_t t = c.batch > 0 ? row : rows[row];
    const double* keys = kv.data() + (c.batch > 0 ? t / c.tokens : 0) * c.keys() * c.qk_dim;
    for (std::int64_t h = 0; h < c.heads; h += c.full ? kHeadStep : 1) {
      const std::int64_t at = row * c.heads + h;
      const double total = sink.empty() ? lse[at] : log_of_sum(lse[at], sink[h]);
      const std::span sum = std::span(sums).subspan(at * c.v_dim, c.v_dim);
      std::fill(sum.begin(), sum.end(), 0.0);
      for (std::int64_t j = 0; j < c.topk; ++j) {
        if (!oracle.lists.valid(t, j)) continue;
        const double* key = keys + oracle.lists.indices[t * c.topk + j] * c.qk_dim;
        const double dot = std::inner_product(key, key + c.qk_dim, q.data() + at * c.qk_dim, 0.0);
        const double p = std::exp(c.attention_scale() * dot - total);
        for (std::int64_t d = 0; d < c.v_dim; ++d) sum[d] += p * std::abs(key[d]);
      }
    }
  }
  return sums;
}

void check_backward(Trial& trial, const Case& c, SparseAttentionWork& work,
                    const SparseAttentionWork& oracle, const SparseAttentionBackward& args,
                    const Buffer& d_kv, const std::string& form) {
  const bool added = args.d_kv.dtype == DType::f32;
  const std::vector<double> d_kv_before = d_kv.download();
  const std::vector<double> d_sink_before = work.d_sink.download();
  work.d_q.poison();
  if (!trial.run("backward" + form, args)) return;
  const Limit limit = gradient_limit(c.dtype);
  trial.add(compare("d_q" + form, trial.compared(work.d_q), oracle.d_q.download(), limit));
  const std::vector<double> d_kv_after = d_kv.download();
  trial.add(compare("d_kv" + form, added ? difference(d_kv_after, d_kv_before) : d_kv_after,
                    oracle.d_kv.download(), limit));
  if (c.sink)
    trial.add(compare("d_sink" + form, difference(work.d_sink.download(), d_sink_before),
                      oracle.d_sink.download(), limit));
}

}  // namespace

std::vector<Report> check_sparse_attention(const Case& c, const Execution& execution,
                                           std::uint64_t seed) {
  Trial trial(c, execution, seed);
  SparseAttentionWork work(c, trial.tested(), seed);
  if (!trial.run("forward", work.forward)) return trial.reports();
  const SparseAttentionWork oracle(c, trial.oracle(), seed);
  run(oracle.forward, kOracle);
  run(oracle.backward, kOracle);

  const std::vector<double> out = oracle.out.download();
  const std::vector<double> lse = oracle.lse.download();
  trial.add(compare("out", trial.compared(work.out), out, output_limit(c.dtype),
                    output_units(c.dtype, out, sums_of_magnitudes(c, oracle, trial.rows()))));
  trial.add(compare("lse", trial.compared(work.lse), lse, lse_limit(c.dtype), at_least_one(lse)));
  if (c.extras) {
    const std::vector<double> largest = oracle.max_logits.download();
    trial.add(compare("max_logits", trial.compared(work.max_logits), largest, lse_limit(c.dtype),
                      at_least_one(largest)));
  }
  check_backward(trial, c, work, oracle, work.backward, work.d_kv, "");
  if (work.d_kv_rounded.tensor())
    check_backward(trial, c, work, oracle, work.backward_rounded, work.d_kv_rounded, ", rounded");
  trial.check_canaries(work.buffers);
  return trial.reports();
}

}  // namespace winnow::harness
