// SPDX-License-Identifier: Apache-2.0
// Sparse attention, forward, on Hopper: 576/512 and 512/512, bf16 and f16.
//
// A work item is one query and 64 of its heads. Thread blocks are persistent and take every
// gridDim.x-th item; the pipeline runs on from one item into the next.
//
// clang-format off
// warpgroup 0, scores        For every block of 48 keys: S = Q K^T, online softmax in the log2
//                            domain, P to shared memory. S of the next block is multiplied during
//                            the softmax of this one. Five of the nine tiles of Q stay in
//                            registers, the others in shared memory.
// warpgroups 1, 2, values    out = P V, 256 of the 512 columns each. They are producers too: when a
//                            block has been multiplied, they gather the third block after it into
//                            its stage. They store out while warpgroup 0 is busy with the next
//                            item.
//
// barriers of a stage        full   its rows have landed
//                            ready  P is written
//                            free   out has used the stage
// clang-format on
//
// Shared memory: three stages of nine tiles (48 keys x 576 channels; the ninth holds the rope part
// and, once S is done, P) and four tiles of Q: 194 KiB. Registers: 168 a thread (scores: 80 of Q
// and twice 24 of S; values: 128 of out). The limit is the tensor cores; close to them are the
// instructions of the softmax and, with many keys, the gather.
#include <algorithm>
#include <cstdint>

#include "core/refusals.h"
#include "cuda/common/runtime.h"
#include "cuda/sparse_attention/forward_sm90/scores.cuh"
#include "cuda/sparse_attention/forward_sm90/values.cuh"
#include "cuda/sparse_attention/kernels.h"

namespace winnow::cuda {
namespace {

using namespace sparse_attention::forward_sm90;

template <class T, int kTiles>
__global__ void __launch_bounds__(kThreads, 1)
    sparse_attention_forward_kernel(const __grid_constant__ ForwardParameters params) {
  extern __shared__ __align__(1024) std::byte memory[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(memory);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      // Each gathering thread arrives for its copies, two of them for the info as well.
      shared.full[i].init(kGatherThreads + 2);
      shared.ready[i].init(kWarpgroup);
      shared.free[i].init(kGatherThreads / 32);
    }
    fence_barrier_init();
  }
  __syncthreads();
  if (threadIdx.x < kWarpgroup) {
    grow_registers<kRegisters>();
    compute_scores<T, kTiles>(params, shared);
  } else {
    grow_registers<kRegisters>();
    compute_values<T, kTiles>(params, shared);
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
  const bool has_rope = args.q.shape[2] == kStageTiles * kTileColumns;
  launch(has_rope ? sparse_attention_forward_kernel<T, kStageTiles>
                  : sparse_attention_forward_kernel<T, kValueTiles>,
         how, params);
}

std::string why_not(const SparseAttentionForward& args, const Execution&) {
  if (std::string reason = needs_sm90(args.q.device); !reason.empty()) return reason;
  if (args.q.dtype != DType::bf16 && args.q.dtype != DType::f16)
    return sentence(refusal::takes_dtypes, "bf16 and f16");
  const std::int64_t qk_dim = args.q.shape[2];
  if ((qk_dim != 576 && qk_dim != 512) || args.out.shape[2] != 512)
    return sentence(refusal::takes_widths, "576/512 and 512/512");
  if (!has_aligned_rows(args.q) || !has_aligned_rows(args.kv) || !has_aligned_rows(args.out)) {
    return sentence(refusal::takes_aligned_rows, "q, kv and out");
  }
  if (args.scale < 0) return refusal::takes_positive_scale;
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

const winnow::Kernel<SparseAttentionForward> forward_sm90 = {"sm90", why_not, no_workspace, run};

}  // namespace winnow::cuda
