// SPDX-License-Identifier: Apache-2.0
// Sparse attention, forward, on Hopper with up to 16 heads: 576/512 and 512/512, bf16 and f16.
//
// A work item is one query with all of its heads; thread blocks are persistent and take every
// gridDim.x-th item. Keys and channels are the 64 rows of the products and heads their 16 columns,
// so that no row of the tensor cores is padding.
//
// clang-format off
// two teams of two warpgroups, each with every second block of 64 keys of an item
//   math      S^T = K Q^T (64 keys x 16 heads), online softmax over the rows, P to shared memory;
//             out^T += V^T P^T (8 tiles of 64 channels x 16 heads, in registers)
//   producer  gathers the team's keys; that of team 0 copies Q, an item ahead
//
// While one team multiplies, the other's keys land: a team has a single stage. At the end of an
// item each team adds the other's sums to its own for half of the channels, and stores them.
//
// barriers        full       the rows of a block have landed
//                 free       out has used 16 of its keys
//                 q_full     Q of an item has landed
//                 q_free     Q's memory, through which out is stored, can be overwritten
//                 sums_full  both teams' sums of an item are written
//                 sums_free  the other team has added a team's sums of an item
// clang-format on
//
// Shared memory, 217 KiB: two stages of 72 KiB, Q of two items 36, the teams' sums 32, P 4. The
// limit is the gather, 1152 bytes for 34,816 FLOPs; next to it the bandwidth of shared memory: the
// products read every key twice, and Q with each.
#include <algorithm>
#include <cstdint>

#include "core/refusals.h"
#include "cuda/common/runtime.h"
#include "cuda/sparse_attention/forward_few_heads_sm90/attend.cuh"
#include "cuda/sparse_attention/forward_few_heads_sm90/gather.cuh"
#include "cuda/sparse_attention/kernels.h"

namespace winnow::cuda {
namespace {

using namespace sparse_attention::forward_few_heads;

template <class T, int kTiles>
__global__ void __launch_bounds__(kThreads, 1)
    sparse_attention_few_heads_kernel(const __grid_constant__ ForwardParameters params) {
  extern __shared__ __align__(1024) std::byte memory[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(memory);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kTeams; ++i) {
      // Each gathering thread arrives for its copies, one of a warp for `valid` as well.
      shared.full[i].init(kWarpgroup + 4);
      for (Barrier& free : shared.free[i]) free.init(4);
      shared.sums_free[i].init(kWarpgroup);
    }
    shared.sums_full.init(kTeams * kWarpgroup);
    for (int i = 0; i < 2; ++i) {
      shared.q_full[i].init(kWarpgroup);
      shared.q_free[i].init(kTeams * kWarpgroup);
    }
    fence_barrier_init();
  }
  __syncthreads();
  const int warpgroup = static_cast<int>(threadIdx.x) / kWarpgroup;
  if (warpgroup == 0) {
    grow_registers<kMathRegisters>();
    Attention<T, kTiles, 0>(params, shared).run();
  } else if (warpgroup == 1) {
    grow_registers<kMathRegisters>();
    Attention<T, kTiles, 1>(params, shared).run();
  } else {
    shrink_registers<kGatherRegisters>();
    Gatherer<T, kTiles>(params, shared, warpgroup - kTeams).run();
  }
}

template <class T>
void launch_for(const SparseAttentionForward& args, const Execution& execution) {
  const ForwardParameters params = forward_parameters(args, kHeads);
  const Launch how = {
      .blocks = std::min(params.items, device_properties(args.q.device).multiprocessors),
      .threads = kThreads,
      .shared_bytes = sizeof(SharedStorage),
      .stream = execution.stream,
  };
  const bool has_rope = args.q.shape[2] == kMaxTiles * kTileColumns;
  launch(has_rope ? sparse_attention_few_heads_kernel<T, kMaxTiles>
                  : sparse_attention_few_heads_kernel<T, kValueTiles>,
         how, params);
}

std::string why_not(const SparseAttentionForward& args, const Execution& execution) {
  if (std::string reason = forward_sm90.why_not(args, execution); !reason.empty()) return reason;
  if (args.q.shape[1] > kHeads) return sentence(refusal::takes_dim_up_to, "heads", kHeads);
  return {};
}

void run(const SparseAttentionForward& args, const Execution& execution) {
  if (args.q.shape[0] == 0) return;
  const DeviceGuard guard(args.q.device);
  if (args.q.dtype == DType::bf16) {
    launch_for<__nv_bfloat16>(args, execution);
  } else {
    launch_for<__half>(args, execution);
  }
}

}  // namespace

const winnow::Kernel<SparseAttentionForward> forward_few_heads = {"few_heads", why_not,
                                                                  no_workspace, run};

}  // namespace winnow::cuda
