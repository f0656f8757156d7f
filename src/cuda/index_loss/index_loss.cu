// SPDX-License-Identifier: Apache-2.0
// The indexer's loss. A block walks over a row's slots three times: for the sum of the target and
// the largest score, for the sum of the exponentials, for loss and gradient. It computes in double,
// because the terms of the loss nearly cancel where the indexer has learnt its target. The limit is
// the latency of the first read; the others hit a cache.
#include <cmath>
#include <limits>

#include "backend_operators.h"
#include "core/refusals.h"
#include "cuda/common/block_reduce.cuh"
#include "cuda/common/runtime.h"
#include "cuda/index_loss/divergence.cuh"

namespace winnow::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads)
    divergence_kernel(const __grid_constant__ Divergence call) {
  __shared__ double sum_storage[kThreads / 32];
  __shared__ float largest_storage[kThreads / 32];
  __shared__ std::int64_t count_storage[kThreads / 32];
  const auto add = [](auto a, auto b) { return a + b; };

  for (std::int64_t t = blockIdx.x; t < call.tokens; t += gridDim.x) {
    const RowSlots slots = call.slots.row(t);
    const float* const scores = call.scores + t * call.scores_stride;
    const float* const target = call.target + t * call.target_stride;
    const auto for_valid = [&](auto use) {
      for (std::int64_t j = threadIdx.x; j < slots.count; j += kThreads) {
        if (slots.key(j) < 0) continue;
        const float score = scores[j];
        if (score != -INFINITY) use(j, score);
      }
    };

    std::int64_t valid = 0;
    double target_sum = 0;
    float largest = -INFINITY;  // ignores NaN, which the sum propagates
    for_valid([&](std::int64_t j, float score) {
      ++valid;
      target_sum += target[j];
      largest = fmaxf(largest, score);
    });
    valid = reduce_block<kThreads>(valid, count_storage, add);
    target_sum = reduce_block<kThreads>(target_sum, sum_storage, add);
    largest = reduce_block<kThreads>(largest, largest_storage,
                                     [](float a, float b) { return fmaxf(a, b); });
    const bool counts = valid >= 2 && target_sum != 0;

    double log_sum = 0;  // of exp(score - largest), in which it would be lost if that is large
    if (counts) {
      double exponentials = 0;
      for_valid([&](std::int64_t, float score) {
        exponentials += exp(static_cast<double>(score) - largest);
      });
      log_sum = log(reduce_block<kThreads>(exponentials, sum_storage, add));
    }

    // Every thread overwrites the slots that it has read itself, so that d_scores may be scores.
    double loss = 0;
    const float d_loss = call.d_loss != nullptr ? call.d_loss[t] : 1;
    const std::int64_t written = call.slots.indices != nullptr ? call.slots.slots : slots.count;
    for (std::int64_t j = threadIdx.x; j < written; j += kThreads) {
      double d_score = 0;
      const float score = counts && slots.key(j) >= 0 ? scores[j] : -INFINITY;
      if (score != -INFINITY) {
        const double wanted = target[j] / target_sum;
        const double log_p = (static_cast<double>(score) - largest) - log_sum;
        if (call.loss != nullptr && wanted != 0) loss += wanted * (log(wanted) - log_p);
        d_score = exp(log_p) - wanted;
      }
      if (call.d_scores != nullptr) {
        call.d_scores[t * call.d_scores_stride + j] =
            d_score == 0 ? 0 : static_cast<float>(d_loss * d_score);
      }
    }
    if (call.loss != nullptr) {
      loss = reduce_block<kThreads>(loss, sum_storage, add);
      if (threadIdx.x == 0) call.loss[t] = static_cast<float>(loss);
    }
  }
}

}  // namespace

void compute_divergence(const Divergence& call, cudaStream_t stream) {
  launch(divergence_kernel,
         {.blocks = std::min(call.tokens, kMaxBlocks), .threads = kThreads, .stream = stream},
         call);
}

namespace {

std::string why_not(const IndexLoss& args, const Execution&) {
  return args.scores.dtype == DType::f64 ? refusal::no_f64 : "";
}

void run(const IndexLoss& args, const Execution& execution) {
  const DeviceGuard guard(args.indices.device);
  // Every index that is not negative counts.
  constexpr std::int64_t kAllKeys = std::int64_t{std::numeric_limits<std::int32_t>::max()} + 1;
  compute_divergence({.slots = {.indices = data_of<const std::int32_t>(args.indices),
                                .lengths = data_of<const std::int32_t>(args.lengths),
                                .indices_stride = args.indices.stride[0],
                                .slots = args.indices.shape[1],
                                .keys = kAllKeys},
                      .scores = data_of<const float>(args.scores),
                      .target = data_of<const float>(args.target),
                      .loss = data_of<float>(args.loss),
                      .d_scores = data_of<float>(args.d_scores),
                      .d_loss = nullptr,
                      .scores_stride = args.scores.stride[0],
                      .target_stride = args.target.stride[0],
                      .d_scores_stride = args.d_scores.stride[0],
                      .tokens = args.indices.shape[0]},
                     execution.stream);
}

}  // namespace

Kernels<IndexLoss> kernels(std::type_identity<IndexLoss>) {
  static constexpr Kernel<IndexLoss> kKernels[] = {{"general", why_not, no_workspace, run}};
  return kKernels;
}

}  // namespace winnow::cuda
