// SPDX-License-Identifier: Apache-2.0
// Sparse attention, backward, on Hopper: 576/512 and 512/512, bf16 and f16, any number of heads.
//
// A thread block takes 64 heads of a query at a time; its rows of q and d_out stay in shared memory
// while blocks of 64 keys pass. Three warpgroups:
//   0     gathers a block, S = Q K^T and dP = dO V^T, then P and dS into shared memory; with 576
//         columns also the gradients of the last 64 (the rope part)
//   1, 2  dQ += dS K and dKV = dS^T Q + P^T dO of 256 columns each
// dQ stays in registers; dKV is made 64 columns at a time and added to device memory straight from
// registers.
//
//   0     | S | P | dP | dS |gather, rope| S | P | dP | dS |gather ...
//   1, 2  ... dKV, add  ... |dQ| dKV, add | dKV, add | ... |dQ| ...
//
// Barriers of a block: scores_full (P and dS are there), kv_free (dQ is done: the next block may
// come), scores_free (dKV is done: the next P and dS may). Shared memory: q 72, d_out 64, keys 72,
// P and dS 16 KiB. Runs against the L2 cache, which adds 2304 bytes for every key of a query.
#include <algorithm>
#include <cstdint>

#include "cuda/key_sums.cuh"
#include "cuda/ops.h"
#include "cuda/runtime.h"
#include "cuda/sparse_attention_backward/gradients.cuh"
#include "cuda/sparse_attention_backward/scores.cuh"
#include "cuda/tensor_map.h"

namespace winnow::cuda {
namespace {

using namespace backward;

template <class T, int kTiles>
__global__ void __launch_bounds__(kThreads, 1)
    sparse_attention_backward_kernel(const __grid_constant__ CUtensorMap q,
                                     const __grid_constant__ CUtensorMap d_out,
                                     const __grid_constant__ Params<T> params) {
  extern __shared__ __align__(1024) std::byte memory[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(memory);
  if (threadIdx.x == 0) {
    constexpr int kGradientWarps = 2 * kWarpgroup / 32;
    shared.item_full.init(1);
    shared.item_free.init(kThreads / 32);
    shared.numbers_full.init(kGradientWarps);
    shared.scores_full.init(kWarpgroup);
    shared.scores_free.init(kGradientWarps);
    shared.kv_free.init(kGradientWarps);
    fence_barrier_init();
  }
  __syncthreads();
  if (threadIdx.x < kWarpgroup) {
    lower_registers<kScoreRegisters>();
    compute_scores<T, kTiles>(params, q, d_out, shared);
  } else {
    set_registers<kGradientRegisters>();
    compute_gradients<T>(params, shared);
  }
}

template <class T>
void launch_for(const SparseAttentionBackward& args, const KeySums& d_kv,
                const Execution& execution) {
  const auto heads = static_cast<int>(args.q.shape[1]);
  const int head_blocks = (heads + kHeads - 1) / kHeads;
  const Params<T> params = {
      .kv = data_of<const T>(args.kv),
      .out = data_of<const T>(args.out),
      .d_out = data_of<const T>(args.d_out),
      .indices = data_of<const std::int32_t>(args.indices),
      .lengths = data_of<const std::int32_t>(args.lengths),
      .sink = data_of<const float>(args.sink),
      .lse = data_of<const float>(args.lse),
      .d_lse = data_of<const float>(args.d_lse),
      .d_q = data_of<T>(args.d_q),
      .d_kv = d_kv.data,
      .d_sink = data_of<float>(args.d_sink),
      .kv_row = args.kv.stride[0],
      .out_row = args.out.stride[0],
      .out_head = args.out.stride[1],
      .d_out_row = args.d_out.stride[0],
      .d_out_head = args.d_out.stride[1],
      .indices_row = args.indices.stride[0],
      .lse_row = args.lse.stride[0],
      .d_lse_row = args.d_lse ? args.d_lse.stride[0] : 0,
      .d_q_row = args.d_q.stride[0],
      .d_q_head = args.d_q.stride[1],
      .d_kv_row = d_kv.stride,
      .heads = heads,
      .keys = static_cast<int>(args.kv.shape[0]),
      .topk = static_cast<int>(args.indices.shape[1]),
      .head_blocks = head_blocks,
      .items = static_cast<int>(args.q.shape[0] * head_blocks),
      .scale = args.scale,
      .scale_log2 = args.scale * kLog2e,
  };
  const bool has_rope = args.q.shape[2] == kMaxTiles * kTileColumns;
  constexpr std::uint32_t kRows = kHeads;
  launch(has_rope ? sparse_attention_backward_kernel<T, kMaxTiles>
                  : sparse_attention_backward_kernel<T, kValueTiles>,
         {.blocks = std::min(params.items, device_properties(args.q.device).multiprocessors),
          .threads = kThreads,
          .shared_bytes = sizeof(SharedStorage),
          .stream = execution.stream},
         make_tensor_map(args.q, {1, kRows, kTileColumns}),
         make_tensor_map(args.d_out, {1, kRows, kTileColumns}), params);
}

}  // namespace

std::string why_not_fast(const SparseAttentionBackward& args, const Execution& execution) {
  const DeviceProperties& device = device_properties(args.q.device);
  if (device.major != 9 || device.minor != 0) return "needs compute capability 9.0";
  if (args.q.dtype != DType::bf16 && args.q.dtype != DType::f16) return "takes bf16 and f16";
  const std::int64_t qk_dim = args.q.shape[2];
  if ((qk_dim != 576 && qk_dim != 512) || args.out.shape[2] != 512)
    return "takes widths 576/512 and 512/512";
  for (const Tensor* tensor : {&args.kv, &args.out, &args.d_out, &args.d_q, &args.d_kv}) {
    if (!has_aligned_rows(*tensor))
      return "takes rows of kv, out and gradients that begin at 16-byte boundaries";
  }
  if (args.q.shape[0] > 0 && (!can_have_tensor_map(args.q) || !can_have_tensor_map(args.d_out)))
    return "takes rows of q and d_out that begin at 16-byte boundaries, one behind another";
  constexpr std::int64_t kMostItems = std::int64_t{1} << 30;
  if (args.q.shape[0] * ((args.q.shape[1] + kHeads - 1) / kHeads) > kMostItems)
    return "takes fewer rows";
  if (execution.deterministic) return "adds in any order";
  return {};
}

std::size_t workspace_bytes_fast(const SparseAttentionBackward& args, const Execution&) {
  return Workspace::bytes({key_copy_bytes(args.d_kv)});
}

void run_fast(const SparseAttentionBackward& args, const Execution& execution) {
  const DeviceGuard guard(args.d_kv.device);
  Workspace workspace(execution, workspace_bytes_fast(args, execution));
  const KeySums sums = begin_key_sums(args.d_kv, workspace, execution.stream);
  if (args.q.shape[0] > 0) {
    if (args.q.dtype == DType::bf16) {
      launch_for<__nv_bfloat16>(args, sums, execution);
    } else {
      launch_for<__half>(args, sums, execution);
    }
  }
  finish_key_sums(sums, args.d_kv, execution.stream);
}

}  // namespace winnow::cuda
