// SPDX-License-Identifier: Apache-2.0
// Sparse attention, forward, on Hopper: 576/512 and 512/512, bf16 and f16.
//
// A work item is one query and 64 of its heads. Thread blocks are persistent and take every
// gridDim.x-th item; the pipeline runs on from one item into the next. Blocks of 64 keys are worked
// on in pairs, one of each math warpgroup; out has 512 columns, 256 of each.
//
// clang-format off
// warpgroup 0                     warpgroup 1                     warpgroup 2, producer
//   S0 = Q K0^T, early tiles        S1 = Q K1^T, early tiles        finds blocks that have keys,
//   out += P1 V1 of the pair        out += P0 V0                    tells what they hold,
//     before, columns 0-255           columns 256-511               gathers each part as soon as
//   S0, the other tiles             S1, the other tiles             its slices are free
//   softmax: P0 to registers        softmax: P1 likewise
//     and shared memory             last pair: load Q of the
//   out += P0 V0                      next item by TMA
//   last pair: lse, max_logits,     out += P1 V1
//     normalizers; store out        last pair: store out
//
// barriers   info_full  what a block holds is told
//            full       a part of a block has landed
//            free       out has used 16 keys of one half of a block's columns
//            ready      P and the running maxima of a block are written
//            q_full     Q of an item has landed
//            finished   the normalizers of an item are written
// clang-format on
//
// While one warpgroup is at its softmax, the other one multiplies the early tiles of its scores: as
// many as have landed by the time that P is ready. The critical path is from one P to the next:
// hand-over, P V of the other block, the other tiles of S, softmax. What shortens it raises the
// power that is drawn, and the clock falls: that is the other limit. The running maximum goes from
// block to block in their order, so both halves of out see the same. An item has whole pairs: where
// its number of blocks is odd, the last block 1 is empty.
//
// Shared memory, 217 KiB: Q 72, two blocks of 72 each, whose rope tile holds P once S is done.
// Registers: 216 a thread of math (128 of out, 32 of S, 16 of P), 72 of the producer.
#include <algorithm>
#include <cstdint>

#include "core/refusals.h"
#include "cuda/common/runtime.h"
#include "cuda/common/tensor_map.h"
#include "cuda/sparse_attention/alike_lists.cuh"
#include "cuda/sparse_attention/forward_sm90/attend.cuh"
#include "cuda/sparse_attention/forward_sm90/gather.cuh"
#include "cuda/sparse_attention/kernels.h"
#include "cuda/sparse_attention/spread_start.cuh"

namespace winnow::cuda {
namespace {

using namespace sparse_attention::forward_sm90;

/// The slots of an item, 0 if one of some that are looked at holds no key: then it may have few.
__device__ int full_slots(const ForwardParameters& params, int item) {
  const std::int64_t t = item / params.head_groups;
  const int slots = slots_of_row(params, t);
  if (slots == 0) return 0;
  constexpr int kLooks = 5;
  for (int i = 0; i < kLooks; ++i) {
    const std::int64_t slot = std::int64_t{slots - 1} * i / (kLooks - 1);
    const int key = __ldg(params.indices + t * params.indices_stride + slot);
    if (key < 0 || key >= params.keys) return 0;
  }
  return slots;
}

// What a block of keys takes, measured on an H200.
constexpr int kCyclesOfBlock = 2800;

/// Whether lists are so much alike that the keys in use at a time stay in L2, wherever in its list
/// each thread block is. Called by all threads.
__device__ bool are_few_keys_in_use(const ForwardParameters& params) {
  constexpr int kMostSlots = (20 << 20) / (kMaxTiles * kTileColumns * 2);  // a list leaves room
  constexpr int kLeastSlots = 512;  // a guess: fewer are not worth the look
  return params.topk >= kLeastSlots && params.topk <= kMostSlots &&
         sparse_attention::lists_are_alike<kThreads>(params);
}

/// Spreads the change of items by up to `cycles` for a block of keys, or by all that it takes where
/// lists are alike. Called by all threads.
__device__ void delay_start(const ForwardParameters& params, int cycles) {
  if (!sparse_attention::has_time_to_spare(params.items)) return;
  const bool may_spread_fully = cycles < kCyclesOfBlock && are_few_keys_in_use(params);
  if (threadIdx.x != 0) return;
  // The least of three items, of which the last one stands for the last ones of all others: they
  // must take as long as the delay, and one long row must not delay many short ones.
  const auto block = static_cast<int>(blockIdx.x);
  const int slots =
      min(min(full_slots(params, block), full_slots(params, block + static_cast<int>(gridDim.x))),
          full_slots(params, params.items - 1));
  sparse_attention::spread_start(
      params.items, std::int64_t{slots / kBlock} * (may_spread_fully ? kCyclesOfBlock : cycles));
}

template <class T, int kTiles>
__global__ void __launch_bounds__(kThreads, 1)
    sparse_attention_forward_kernel(const __grid_constant__ CUtensorMap q,
                                    const __grid_constant__ ForwardParameters params,
                                    int cycles_per_block) {
  extern __shared__ __align__(1024) std::byte memory[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(memory);
  delay_start(params, cycles_per_block);
  if (threadIdx.x == 0) {
    prefetch(q);
    for (int side = 0; side < 2; ++side) {
      for (int i = 0; i < 2; ++i) {
        shared.info_full[side][i].init(1);
        for (Barrier& free : shared.free[side][i]) free.init(4);  // the warps of a warpgroup
      }
      for (Barrier& full : shared.full[side]) full.init(kWarpgroup);
      shared.ready[side].init(kWarpgroup);
    }
    shared.q_full.init(1);
    shared.finished.init(kWarpgroup);
    fence_barrier_init();
  }
  __syncthreads();
  if (threadIdx.x < kWarpgroup) {
    grow_registers<kMathRegisters>();
    Attention<T, kTiles, 0>(params, q, shared).run();
  } else if (threadIdx.x < 2 * kWarpgroup) {
    grow_registers<kMathRegisters>();
    Attention<T, kTiles, 1>(params, q, shared).run();
  } else {
    shrink_registers<kProducerRegisters>();
    Gatherer<T, kTiles>(params, shared).run();
  }
}

/// The cycles for a block of keys by which thread blocks may start apart, whatever lists are like:
/// what it takes, or less. Thread blocks sweep over the keys together, and the part of the keys
/// between them should stay in L2: a spread over 64 MiB of random keys cost 2 %, over 32 MiB
/// nothing.
int delay_per_block(const Tensor& kv) {
  constexpr double kSpreadBytes = 32 << 20;
  const double bytes = static_cast<double>(kv.shape[0] * kv.shape[1]) * element_bytes(kv.dtype);
  return static_cast<int>(kCyclesOfBlock * std::min(1.0, kSpreadBytes / bytes));
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
  launch(has_rope ? sparse_attention_forward_kernel<T, kMaxTiles>
                  : sparse_attention_forward_kernel<T, kValueTiles>,
         how, make_tensor_map(args.q, {1, kHeads, kTileColumns}), params, delay_per_block(args.kv));
}

std::string why_not(const SparseAttentionForward& args, const Execution&) {
  if (std::string reason = needs_sm90_and_16_bits(args.q); !reason.empty()) return reason;
  const std::int64_t qk_dim = args.q.shape[2];
  if ((qk_dim != 576 && qk_dim != 512) || args.out.shape[2] != 512)
    return sentence(refusal::takes_widths, "576/512 and 512/512");
  if (!has_aligned_rows(args.q) || !has_aligned_rows(args.kv) || !has_aligned_rows(args.out)) {
    return sentence(refusal::takes_aligned_rows, "q, kv and out");
  }
  if (args.q.shape[0] > 0 && !can_have_tensor_map(args.q))
    return sentence(refusal::takes_dense_rows, "q");
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
