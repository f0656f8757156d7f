// SPDX-License-Identifier: Apache-2.0
// Checks of index_target, index_loss and dense_index_loss.
#include "harness/index_loss.h"
#include "harness/numbers.h"
#include "harness/trial.h"

namespace winnow::harness {
namespace {

/// The lse of attention over the slots of index_target, of which its p are a part: where pools have
/// an offset, attention saw rows beside them.
std::vector<double> attention_lse(const Case& c, const IndexTargetWork& oracle) {
  std::vector<std::int32_t> keys = oracle.indices.download_ints();
  for (std::int32_t& key : keys) key = key >= 0 && key < c.index_keys() ? key + c.key_offset() : -1;
  const std::int64_t rows = oracle.args.q.shape[0];
  constexpr std::int64_t kFewestChannels = 8;  // values are not needed
  Buffer indices(Device{}, DType::i32, {rows, c.index_topk()});
  indices.upload(keys);
  const Buffer out(Device{}, DType::f64, {rows, c.heads, kFewestChannels});
  const Buffer lse(Device{}, DType::f64, {rows, c.heads});
  auto args = oracle.buffers.arguments<SparseAttentionForward>();
  args.indices = indices.tensor();
  args.sink = {};
  args.out = out.tensor();
  args.lse = lse.tensor();
  args.scale = oracle.args.scale;
  run(args, kOracle);
  std::vector<double> values = lse.download();
  for (double& value : values) value = rounded(DType::f32, value + (c.has_pools() ? 0.4 : 0));
  return values;
}

void check_backward(Trial& trial, const Case& c, DenseIndexLossWork& work,
                    const DenseIndexLossWork& oracle, const DenseIndexLossBackward& args,
                    const Buffer& d_index_k, const std::string& form) {
  const bool added = args.d_index_k.dtype == DType::f32;
  const std::vector<double> before = d_index_k.download();
  work.d_index_q.poison();
  work.d_weights.poison();
  if (!trial.run("backward" + form, args)) return;
  const Limit limit = gradient_limit(c.dtype);
  trial.add(compare("d_index_q" + form, trial.compared(work.d_index_q), oracle.d_index_q.download(),
                    limit));
  trial.add(compare("d_weights" + form, trial.compared(work.d_weights), oracle.d_weights.download(),
                    limit));
  const std::vector<double> after = d_index_k.download();
  trial.add(compare("d_index_k" + form, added ? difference(after, before) : after,
                    oracle.d_index_k.download(), limit));
}

}  // namespace

std::vector<Report> check_index_target(const Case& c, const Execution& execution,
                                       std::uint64_t seed) {
  Trial trial(c, execution, seed);
  IndexTargetWork work(c, trial.tested(), seed);
  IndexTargetWork oracle(c, trial.oracle(), seed);
  const std::vector<double> lse = attention_lse(c, oracle);
  oracle.lse.upload(lse);
  trial.upload(lse, work.lse);
  if (!trial.run("target", work.args)) return trial.reports();
  run(oracle.args, kOracle);
  std::vector<double> expected = oracle.target.download();
  trial.add(compare("target", trial.compared(work.target), expected, target_limit(c.dtype)));
  IndexTarget added = work.args;
  added.accumulate = true;
  if (trial.run("target, added", added)) {
    for (double& value : expected) value *= 2;
    trial.add(
        compare("target, added", trial.compared(work.target), expected, target_limit(c.dtype)));
  }
  trial.check_canaries(work.buffers);
  return trial.reports();
}

std::vector<Report> check_index_loss(const Case& c, const Execution& execution,
                                     std::uint64_t seed) {
  Trial trial(c, execution, seed);
  const IndexLossWork work(c, trial.tested(), seed);
  if (!trial.run("loss", work.args)) return trial.reports();
  const IndexLossWork oracle(c, trial.oracle(), seed);
  run(oracle.args, kOracle);
  const std::vector<double> loss = oracle.loss.download();
  trial.add(
      compare("loss", trial.compared(work.loss), loss, loss_limit(DType::f32), at_least_one(loss)));
  trial.add(compare("d_scores", trial.compared(work.d_scores), oracle.d_scores.download(),
                    loss_gradient_limit()));
  trial.check_canaries(work.buffers);
  return trial.reports();
}

std::vector<Report> check_dense_index_loss(const Case& c, const Execution& execution,
                                           std::uint64_t seed) {
  Trial trial(c, execution, seed, 4);  // whole windows are long: few rows will do
  DenseIndexLossWork work(c, trial.tested(), seed);
  if (!trial.run("forward", work.forward)) return trial.reports();
  const DenseIndexLossWork oracle(c, trial.oracle(), seed);
  run(oracle.forward, kOracle);
  run(oracle.backward, kOracle);

  const std::vector<double> loss = oracle.loss.download();
  const std::vector<double> lse = oracle.lse.download();
  trial.add(
      compare("loss", trial.compared(work.loss), loss, loss_limit(c.dtype), at_least_one(loss)));
  trial.add(compare("lse", trial.compared(work.lse), lse, lse_limit(c.dtype), at_least_one(lse)));
  work.loss.poison();
  if (trial.run("forward, lse given", work.forward_given))
    trial.add(compare("loss, lse given", trial.compared(work.loss), loss, loss_limit(c.dtype),
                      at_least_one(loss)));
  check_backward(trial, c, work, oracle, work.backward, work.d_index_k, "");
  if (work.d_index_k_rounded.tensor())
    check_backward(trial, c, work, oracle, work.backward_rounded, work.d_index_k_rounded,
                   ", rounded");
  trial.check_canaries(work.buffers);
  return trial.reports();
}

}  // namespace winnow::harness
