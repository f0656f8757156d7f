// SPDX-License-Identifier: Apache-2.0
// The indexer's target: the probability of a key, summed over heads. Every head and slot takes one
// product (common/head_products.cuh) and one exponential; heads past 64 add to the sums of the
// first.
#include <array>
#include <cmath>

#include "backend_operators.h"
#include "core/refusals.h"
#include "cuda/index_loss/attention_target.cuh"
#include "cuda/index_loss/kernels.h"
#include "cuda/index_loss/probability.cuh"

namespace winnow::cuda {
namespace {

/// The probability of a key in one head.
struct Probability {
  const float* lse;   // [tokens, heads], natural
  const float* sink;  // [heads], or null
  std::int64_t lse_stride;
  float scale;

  __device__ float of_head(std::int64_t t, int h) const {
    return log_sum_of_head(lse[t * lse_stride + h], sink != nullptr ? sink[h] : -INFINITY);
  }
  __device__ float operator()(float product, float log_sum) const {
    return probability(product, scale, log_sum);
  }
};

}  // namespace

void sum_probabilities(const AttentionTarget& call, cudaStream_t stream) {
  const auto* const lse = data_of<const float>(call.lse);
  const auto* const sink = data_of<const float>(call.sink);
  for_each_pass(call.q, call.kv, call.slots,
                [&]<class T, int kHeads>(const HeadOperands& operands, std::int64_t first_head) {
                  const Probability term{.lse = lse + first_head,
                                         .sink = sink != nullptr ? sink + first_head : nullptr,
                                         .lse_stride = call.lse.stride[0],
                                         .scale = call.scale};
                  sum_heads<T, kHeads>(operands, call.target, term,
                                       call.accumulate || first_head > 0, stream);
                });
}

namespace {

std::string why_not(const IndexTarget& args, const Execution&) {
  return args.q.dtype == DType::f64 ? refusal::no_f64 : "";
}

void run(const IndexTarget& args, const Execution& execution) {
  const DeviceGuard guard(args.q.device);
  sum_probabilities({.q = args.q,
                     .kv = args.kv,
                     .sink = args.sink,
                     .lse = args.lse,
                     .scale = args.scale,
                     .slots = {.indices = data_of<const std::int32_t>(args.indices),
                               .lengths = data_of<const std::int32_t>(args.lengths),
                               .indices_stride = args.indices.stride[0],
                               .slots = args.indices.shape[1],
                               .keys = args.kv.shape[0] - args.key_offset,
                               .key_offset = args.key_offset},
                     .target = {.data = data_of<float>(args.target),
                                .stride = args.target.stride[0],
                                .fills_rows = true},
                     .accumulate = args.accumulate},
                    execution.stream);
}

}  // namespace

Kernels<IndexTarget> kernels(std::type_identity<IndexTarget>) {
  static const std::array kKernels = {index_target_sm90,
                                      Kernel<IndexTarget>{"general", why_not, no_workspace, run}};
  return kKernels;
}

}  // namespace winnow::cuda
