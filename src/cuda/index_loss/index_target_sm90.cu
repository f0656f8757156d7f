// SPDX-License-Identifier: Apache-2.0
// The indexer's target on Hopper: rows of 576 or 512 channels, bf16 and f16, any number of heads.
//
// A thread block is persistent and takes every gridDim.x-th query row, with up to 128 of its heads;
// the pipeline runs on from one row into the next.
//
// clang-format off
// consumers, a warpgroup     S = Q K^T for every block of 64 keys, Q in registers (144 a thread).
// for 64 heads               Probabilities are summed over heads in registers, over lanes by
//                            shuffles, over warps in shared memory; one number a slot is stored. A
//                            single warpgroup does so during the products of the next block, two
//                            of them take turns at the tensor cores.
// producers, the other one   gather Q of a row, then its keys, by cp.async, three blocks ahead, a
// or two warpgroups          third or a half of a block's channels at a time
//
// barriers of a chunk        full  its channels have landed
//                            free  the consumers are done with it
// clang-format on
//
// Shared memory: three stages of 64 keys, 216 KiB. With 64 heads each gathered byte is used for 64
// operations: the gather from L2 is close to the limit, which is how fast one warpgroup multiplies
// and sums. A row's sums are made in an order of their own, so results are bitwise reproducible.
#include <algorithm>
#include <cstdint>
#include <string>

#include "core/refusals.h"
#include "cuda/common/runtime.h"
#include "cuda/index_loss/index_target_sm90/consumer.cuh"
#include "cuda/index_loss/index_target_sm90/producer.cuh"
#include "cuda/index_loss/kernels.h"

namespace winnow::cuda {
namespace {

using namespace target_sm90;

template <class T, class Shape>
__global__ void __launch_bounds__(kThreads, 1)
    index_target_kernel(const __grid_constant__ Parameters params) {
  extern __shared__ __align__(1024) std::byte memory[];
  auto& shared = *reinterpret_cast<SharedStorage<Shape>*>(memory);
  // Each producer thread arrives for its copies, one of them for the info as well.
  if (threadIdx.x == 0) shared.ring.init(Shape::kProducerThreads, true);
  __syncthreads();
  if (threadIdx.x < Shape::kConsumerThreads) {
    grow_registers<Shape::kConsumerRegisters>();
    Consumer<T, Shape>(params, shared).run();
  } else {
    shrink_registers<Shape::kProducerRegisters>();
    Producer<T, Shape>(params, shared).run();
  }
}

/// The parameters of the pass over the heads from first_head on.
template <class T>
Parameters parameters(const IndexTarget& args, std::int64_t first_head, std::int64_t heads) {
  const auto* const sink = data_of<const float>(args.sink);
  return {.heads = {.lse = data_of<const float>(args.lse) + first_head,
                    .sink = sink != nullptr ? sink + first_head : nullptr,
                    .lse_stride = args.lse.stride[0],
                    .count = static_cast<std::int32_t>(heads)},
          .q = static_cast<const T*>(args.q.data) + first_head * args.q.stride[1],
          .kv = static_cast<const T*>(args.kv.data) + args.key_offset * args.kv.stride[0],
          .indices = data_of<const std::int32_t>(args.indices),
          .lengths = data_of<const std::int32_t>(args.lengths),
          .target = data_of<float>(args.target),
          .q_token_stride = args.q.stride[0],
          .q_head_stride = args.q.stride[1],
          .kv_stride = args.kv.stride[0],
          .indices_stride = args.indices.stride[0],
          .target_stride = args.target.stride[0],
          .tokens = static_cast<std::int32_t>(args.q.shape[0]),
          .keys = static_cast<std::int32_t>(args.kv.shape[0] - args.key_offset),
          .topk = static_cast<std::int32_t>(args.indices.shape[1]),
          .scale = args.scale,
          .adds = args.accumulate || first_head > 0};
}

template <class T, int kTiles>
void launch_passes(const IndexTarget& args, const Execution& execution) {
  const auto launch_pass = [&]<class Shape>(Shape, const Parameters& params) {
    launch(index_target_kernel<T, Shape>,
           {.blocks = std::min(params.tokens, device_properties(args.q.device).multiprocessors),
            .threads = kThreads,
            .shared_bytes = sizeof(SharedStorage<Shape>),
            .stream = execution.stream},
           params);
  };
  const std::int64_t heads = args.q.shape[1];
  for (std::int64_t first = 0; first < heads; first += 2 * kGroupHeads) {
    const std::int64_t count = std::min<std::int64_t>(heads - first, 2 * kGroupHeads);
    const Parameters params = parameters<T>(args, first, count);
    if (count <= kGroupHeads) {
      launch_pass(Shape<kTiles, 1>{}, params);
    } else {
      launch_pass(Shape<kTiles, 2>{}, params);
    }
  }
}

constexpr int kWideDim = 9 * kTileColumns;
constexpr int kNarrowDim = 8 * kTileColumns;

template <class T>
void launch_for(const IndexTarget& args, const Execution& execution) {
  if (args.q.shape[2] == kWideDim) {
    launch_passes<T, 9>(args, execution);
  } else {
    launch_passes<T, 8>(args, execution);
  }
}

std::string why_not(const IndexTarget& args, const Execution&) {
  if (std::string reason = needs_sm90_and_16_bits(args.q); !reason.empty()) return reason;
  if (args.q.shape[2] != kWideDim && args.q.shape[2] != kNarrowDim)
    return sentence(refusal::takes_qk_dims, "576 and 512");
  if (!has_aligned_rows(args.q) || !has_aligned_rows(args.kv))
    return sentence(refusal::takes_aligned_rows, "q and kv");
  return {};
}

void run(const IndexTarget& args, const Execution& execution) {
  if (args.q.shape[0] == 0) return;
  const DeviceGuard guard(args.q.device);
  if (args.q.dtype == DType::bf16) {
    launch_for<__nv_bfloat16>(args, execution);
  } else {
    launch_for<__half>(args, execution);
  }
}

}  // namespace

const winnow::Kernel<IndexTarget> index_target_sm90 = {"sm90", why_not, no_workspace, run};

}  // namespace winnow::cuda
