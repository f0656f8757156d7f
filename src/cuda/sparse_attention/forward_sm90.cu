// SPDX-License-Identifier: Apache-2.0
// sparse_attention_forward for Hopper: 576/512 and 512/512, bf16 and fp16.
//
// A work item is one query and 64 of its heads. Thread blocks stay and take every gridDim.x-th
// item; what follows runs on from one item into the next without a seam.
//
// Warpgroup 0, scores: for every block of 48 keys S = Q K^T, online softmax in the log2 domain, P
// to
//   shared memory. S of the next block is multiplied while this one's softmax is made. Five of the
//   nine tiles of Q stay in registers, the others in shared memory.
// Warpgroups 1 and 2, left and right: out = P V, 256 of the 512 columns each. They also gather:
// when
//   a block has been multiplied, the rows of the third one after it are copied into its stage. They
//   write out while scores is busy with the next item.
//
// Shared memory: three stages of nine tiles (48 keys x 576 channels; the ninth holds the rope part
// and, once S is done, P) and four tiles of Q: 194 KiB. Registers: 168 a thread (scores: 80 of Q
// and twice 24 of S; left and right: 128 of out). Barriers of a stage: full (its rows have landed),
// ready (P is written), free (out has used it). Runs against the matrix units; next to them stand
// the instructions of the softmax and, with many keys, the gather.
#include <algorithm>
#include <cstdint>

#include "core/refusals.h"
#include "cuda/common/runtime.h"
#include "cuda/sparse_attention/forward_sm90/scores.cuh"
#include "cuda/sparse_attention/forward_sm90/values.cuh"
#include "cuda/sparse_attention/kernels.h"

namespace winnow::cuda {
namespace {

using namespace forward;

template <class T, int kTiles>
__global__ void __launch_bounds__(kThreads, 1)
    sparse_attention_forward_kernel(const __grid_constant__ Params<T> params) {
  extern __shared__ __align__(1024) std::byte memory[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(memory);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      // Each arrives for its copies, two of them for the info as well.
      shared.full[i].init(kGatherThreads + 2);
      shared.ready[i].init(kWarpgroup);
      shared.free[i].init(kGatherThreads / 32);
    }
    fence_barrier_init();
  }
  __syncthreads();
  if (threadIdx.x < kWarpgroup) {
    set_registers<kRegisters>();
    compute_scores<T, kTiles>(params, shared);
  } else {
    set_registers<kRegisters>();
    compute_values<T, kTiles>(params, shared);
  }
}

template <class T>
void launch_for(const SparseAttentionForward& args, const Execution& execution) {
  const auto heads = static_cast<int>(args.q.shape[1]);
  const int head_blocks = (heads + kHeads - 1) / kHeads;
  const Params<T> params = {
      .q = data_of<const T>(args.q),
      .kv = data_of<const T>(args.kv),
      .indices = data_of<const std::int32_t>(args.indices),
      .lengths = data_of<const std::int32_t>(args.lengths),
      .sink = data_of<const float>(args.sink),
      .out = data_of<T>(args.out),
      .lse = data_of<float>(args.lse),
      .max_logits = data_of<float>(args.max_logits),
      .q_row = args.q.stride[0],
      .q_head = args.q.stride[1],
      .kv_row = args.kv.stride[0],
      .indices_row = args.indices.stride[0],
      .out_row = args.out.stride[0],
      .out_head = args.out.stride[1],
      .lse_row = args.lse.stride[0],
      .max_logits_row = args.max_logits.stride[0],
      .heads = heads,
      .keys = static_cast<int>(args.kv.shape[0]),
      .topk = static_cast<int>(args.indices.shape[1]),
      .head_blocks = head_blocks,
      .items = static_cast<int>(args.q.shape[0] * head_blocks),
      .scale_log2 = args.scale * kLog2e,
  };
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
