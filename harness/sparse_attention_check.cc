// SPDX-License-Identifier: Apache-2.0
// The check of sparse_attention.
#include "harness/sparse_attention.h"
#include "harness/trial.h"
#include "harness/value_magnitudes.h"

namespace winnow::harness {
namespace {

constexpr std::int64_t kHeadStep = 16;  // of a case of full size

void check_backward(Trial& trial, const Case& c, SparseAttentionWork& work,
                    const SparseAttentionWork& oracle, const SparseAttentionBackward& args,
                    const Buffer& d_kv, const std::string& form, bool deterministic = false) {
  const bool added = args.d_kv.dtype == DType::f32;
  const std::vector<double> d_kv_before = d_kv.download();
  const std::vector<double> d_sink_before = work.d_sink.download();
  work.d_q.poison();
  if (!trial.run("backward" + form, args, deterministic)) return;
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
  trial.add(compare(
      "out", trial.compared(work.out), out, output_limit(c.dtype),
      output_units(c.dtype, out, value_magnitudes(oracle.forward, c.full ? kHeadStep : 1))));
  trial.add(compare("lse", trial.compared(work.lse), lse, lse_limit(c.dtype), at_least_one(lse)));
  if (c.extras) {
    const std::vector<double> largest = oracle.max_logits.download();
    trial.add(compare("max_logits", trial.compared(work.max_logits), largest, lse_limit(c.dtype),
                      at_least_one(largest)));
  }
  check_backward(trial, c, work, oracle, work.backward, work.d_kv, "");
  if (work.d_kv_rounded.tensor())
    check_backward(trial, c, work, oracle, work.backward_rounded, work.d_kv_rounded, ", rounded");
  if (!c.full && !c.slow)
    check_backward(trial, c, work, oracle, work.backward, work.d_kv, ", deterministic", true);
  trial.check_canaries(work.buffers);
  return trial.reports();
}

}  // namespace winnow::harness
