// SPDX-License-Identifier: Apache-2.0
// The check of value_projection.
#include "harness/trial.h"
#include "harness/value_projection.h"

namespace winnow::harness {
namespace {

/// sum_c |w_v| |out|: the op itself on magnitudes.
std::vector<double> sums_of_magnitudes(ValueProjectionWork& oracle) {
  oracle.out.upload(magnitudes(oracle.out.download()));
  oracle.w_v.upload(magnitudes(oracle.w_v.download()));
  run(oracle.forward, kOracle);
  return oracle.out_v.download();
}

void check_backward(Trial& trial, const Case& c, ValueProjectionWork& work,
                    const ValueProjectionWork& oracle, const ValueProjectionBackward& args,
                    const Buffer& d_w_v, const std::string& form) {
  const bool added = args.d_w_v.dtype == DType::f32;
  const std::vector<double> before = d_w_v.download();
  work.d_out.poison();
  if (!trial.run("backward" + form, args)) return;
  const Limit limit = gradient_limit(c.dtype);
  trial.add(compare("d_out" + form, trial.compared(work.d_out), oracle.d_out.download(), limit));
  const std::vector<double> after = d_w_v.download();
  trial.add(compare("d_w_v" + form, added ? difference(after, before) : after,
                    oracle.d_w_v.download(), limit));
}

}  // namespace

std::vector<Report> check_value_projection(const Case& c, const Execution& execution,
                                           std::uint64_t seed) {
  Trial trial(c, execution, seed);
  ValueProjectionWork work(c, trial.tested(), seed);
  if (!trial.run("forward", work.forward)) return trial.reports();
  ValueProjectionWork oracle(c, trial.oracle(), seed);
  run(oracle.forward, kOracle);
  run(oracle.backward, kOracle);

  const std::vector<double> out_v = oracle.out_v.download();
  trial.add(compare("out_v", trial.compared(work.out_v), out_v, output_limit(c.dtype),
                    product_units(c.dtype, out_v, sums_of_magnitudes(oracle))));
  check_backward(trial, c, work, oracle, work.backward, work.d_w_v, "");
  if (work.d_w_v_rounded.tensor())
    check_backward(trial, c, work, oracle, work.backward_rounded, work.d_w_v_rounded, ", rounded");
  trial.check_canaries(work.buffers);
  return trial.reports();
}

}  // namespace winnow::harness
