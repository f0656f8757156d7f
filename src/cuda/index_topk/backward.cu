// SPDX-License-Identifier: Apache-2.0
// index_topk, backward: the memory in which d_k is summed, and its limit. gradient.cu and
// gradient_sm90.cu compute the gradients.
#include "backend_operators.h"
#include "core/refusals.h"
#include "cuda/common/runtime.h"
#include "cuda/index_topk/gradient.cuh"

namespace winnow::cuda {
namespace {

KeySumPlan plan_of(const IndexTopkBackward& args, const Execution& execution) {
  return plan_key_sums(args.indices, args.k, args.d_k, execution);
}

std::size_t workspace_bytes(const IndexTopkBackward& args, const Execution& execution) {
  return plan_of(args, execution).bytes;
}

std::string why_not(const IndexTopkBackward& args, const Execution& execution) {
  if (args.q.dtype == DType::f64) return refusal::no_f64;
  return over_limit(plan_of(args, execution).bytes - key_copy_bytes(args.d_k), execution);
}

std::string why_not_sm90(const IndexTopkBackward& args, const Execution& execution) {
  if (std::string reason = why_not_gradient_sm90(args.q, args.k, args.d_q, args.d_k);
      !reason.empty())
    return reason;
  if (execution.deterministic && plan_of(args, execution).terms.slots < args.indices.shape[1])
    return refusal::takes_whole_rows;
  return why_not(args, execution);
}

template <auto kGradient>
void run(const IndexTopkBackward& args, const Execution& execution) {
  const DeviceGuard guard(args.q.device);
  const KeySumPlan plan = plan_of(args, execution);
  Workspace workspace(execution, plan.bytes);
  const KeySums d_k = begin_key_sums(args.d_k, workspace, execution.stream);
  const TermMemory memory = take_terms(plan.terms, workspace);
  kGradient({.q = args.q,
             .k = args.k,
             .weights = args.weights,
             .slots = {.indices = data_of<const std::int32_t>(args.indices),
                       .lengths = data_of<const std::int32_t>(args.lengths),
                       .begin = data_of<const std::int32_t>(args.begin),
                       .end = data_of<const std::int32_t>(args.end),
                       .indices_stride = args.indices.stride[0],
                       .slots = args.indices.shape[1],
                       .keys = args.k.shape[0]},
             .d_scores = data_of<const float>(args.d_scores),
             .d_scores_stride = args.d_scores.stride[0],
             .zero_is_no_slot = false,
             .d_q = args.d_q,
             .d_weights = args.d_weights,
             .d_k = d_k},
            plan.terms, memory, execution.stream);
  finish_key_sums(d_k, args.d_k, execution.stream);
}

}  // namespace

Kernels<IndexTopkBackward> kernels(std::type_identity<IndexTopkBackward>) {
  static constexpr Kernel<IndexTopkBackward> kKernels[] = {
      {"sm90", why_not_sm90, workspace_bytes, run<index_gradient_sm90>},
      {"general", why_not, workspace_bytes, run<index_gradient_general>}};
  return kKernels;
}

}  // namespace winnow::cuda
