// SPDX-License-Identifier: Apache-2.0
// Scores of index_topk on Hopper: rows of 128 elements, up to 64 heads, bf16, f16 and e4m3.
//
// A product has 64 keys as its rows and 256 columns, which are the heads of a group of queries: 8
// queries of up to 32 heads, or 4 of up to 64. Columns are ordered so that a lane holds all heads
// of its queries: relu, weights and the sum over heads happen in its registers.
//
// clang-format off
//   warpgroup 0      the producer warp finds the next tiles of a group, loads its weights, and has
//                    TMA copy Q, once a group, and keys, 128 at a time, into stages
//   warpgroups 1, 2  products and sums of the first and the last 64 keys of a tile, in turns: while
//                    one sums, the tensor cores work for the other
// clang-format on
//
// Each thread block computes an equal and contiguous part of a chunk. Blocks read the same keys at
// about the same time, so most reads hit L2. Q of the next group is loaded while the last keys of a
// group are in use. Shared memory: two stages of 64 KiB of Q and three of 32 KiB of keys; with e4m3
// stages are half as large, and keys have four. The limit is the tensor cores.
#include <cstddef>
#include <cstdint>
#include <string>

#include "core/refusals.h"
#include "cuda/common/tensor_map.h"
#include "cuda/index_topk/kernels.h"
#include "cuda/index_topk/scores_sm90/consumer.cuh"
#include "cuda/index_topk/scores_sm90/producer.cuh"

namespace winnow::cuda::index_topk {
namespace {

using namespace sm90;

template <class T, int kHeads, bool kPadded>
__global__ void __launch_bounds__(kThreads, 1)
    index_topk_scores_kernel(const __grid_constant__ CUtensorMap q,
                             const __grid_constant__ CUtensorMap k,
                             const __grid_constant__ ScoreInputs inputs,
                             const __grid_constant__ Plan plan, int chunk) {
  extern __shared__ __align__(1024) std::byte memory[];
  SharedStorage<T>& shared = *reinterpret_cast<SharedStorage<T>*>(memory);
  if (threadIdx.x == 0) {
    prefetch(q);
    prefetch(k);
    constexpr int kConsumerWarps = 2 * kWarpgroup / 32;
    for (int i = 0; i < kStages<T>; ++i) {
      shared.full[i].init(1);
      shared.free[i].init(kConsumerWarps);
    }
    for (int i = 0; i < kGroups; ++i) {
      shared.queries_full[i].init(32);
      shared.queries_free[i].init(2 * kWarpgroup);
    }
    fence_barrier_init();
  }
  __syncthreads();
  wait_for_previous_grid();
  if (plan.first_tile[plan.first_group[chunk]] == plan.first_tile[plan.first_group[chunk + 1]])
    return;
  if (threadIdx.x < kWarpgroup) {
    shrink_registers<kProducerRegisters>();
    if (threadIdx.x < 32) {
      Producer<T, kHeads>(q, k, inputs, plan, chunk, shared).run();
    }
  } else {
    grow_registers<kConsumerRegisters>();
    // With 64 heads a loop without the code for odd scales is faster, with 32 it is not.
    constexpr bool kScaled = sizeof(T) == 1;
    if (kScaled && (kHeads == 32 || *plan.odd_scales != 0)) {
      consume<T, kHeads, kPadded, kScaled>(inputs, plan, shared);
    } else {
      consume<T, kHeads, kPadded, false>(inputs, plan, shared);
    }
  }
}

std::uint32_t parts_of(std::int64_t heads) { return heads <= 32 ? 1 : 2; }

/// A view of q in the order of a product's columns: number of the head in its part, query, part;
/// see Column. TMA does not ask for strides in the order of their sizes.
Tensor by_column(const Tensor& q) {
  const std::int64_t heads = q.shape[1];
  const std::int64_t parts = parts_of(heads);
  Tensor view = q;
  view.rank = 4;
  view.shape = {(heads + parts - 1) / parts, q.shape[0], parts, q.shape[2]};
  view.stride = {q.stride[1], q.stride[0], heads / parts * q.stride[1], 1};
  return view;
}

template <class T>
ForChunk launcher_for(const IndexTopkForward& args, const Execution& execution) {
  const auto heads = static_cast<int>(args.q.shape[1]);
  const std::uint32_t columns = kTileRowBytes / sizeof(T);
  const Step launch(heads == 32   ? index_topk_scores_kernel<T, 32, false>
                    : heads == 64 ? index_topk_scores_kernel<T, 64, false>
                    : heads < 32  ? index_topk_scores_kernel<T, 32, true>
                                  : index_topk_scores_kernel<T, 64, true>,
                    {.blocks = device_properties(args.q.device).multiprocessors,
                     .threads = kThreads,
                     .shared_bytes = sizeof(SharedStorage<T>),
                     .stream = execution.stream,
                     .pdl = true});
  const CUtensorMap q =
      make_tensor_map(by_column(args.q), {32, 8 / parts_of(heads), parts_of(heads), columns});
  const CUtensorMap k = make_tensor_map(args.k, {kTileKeys, columns});
  return [=, inputs = score_inputs(args)](const Plan& plan, int chunk, NodeChain* chain) {
    launch(chain, q, k, inputs, plan, chunk);
  };
}

}  // namespace

int rows_per_group_sm90(const IndexTopkForward& args) { return args.q.shape[1] <= 32 ? 8 : 4; }

ForChunk scores_sm90(const IndexTopkForward& args, const Execution& execution) {
  if (args.k.shape[0] == 0) return [](const Plan&, int, NodeChain*) {};
  switch (args.q.dtype) {
    case DType::bf16:
      return launcher_for<__nv_bfloat16>(args, execution);
    case DType::f16:
      return launcher_for<__half>(args, execution);
    default:
      return launcher_for<__nv_fp8_e4m3>(args, execution);
  }
}

std::string why_not_scores_sm90(const IndexTopkForward& args) {
  if (std::string reason = needs_sm90(args.q.device); !reason.empty()) return reason;
  if (args.q.dtype == DType::f32) return sentence(refusal::takes_dtypes, "bf16, f16 and f8_e4m3");
  if (args.q.shape[2] != kDim) return sentence(refusal::takes_dim, "index_dim", kDim);
  if (args.q.shape[1] > 64) return sentence(refusal::takes_dim_up_to, "index_heads", 64);
  if (args.q.shape[0] > 0 && !can_have_tensor_map(by_column(args.q)))
    return sentence(refusal::takes_dense_rows, "q");
  if (args.k.shape[0] > 0 && !can_have_tensor_map(args.k))
    return sentence(refusal::takes_dense_rows, "k");
  return {};
}

}  // namespace winnow::cuda::index_topk
