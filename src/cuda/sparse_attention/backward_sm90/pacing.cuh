// SPDX-License-Identifier: Apache-2.0
// How far the thread blocks are through their lists at the same time. Lists mostly ascend, so that
// a block sweeps over the keys once an item; where they do not, this gains nothing.
//
// Where keys and their gradients fit into L2, blocks had better not change items at the same time:
// otherwise all load their next items at once, and add to the same rows where lists are alike. So
// some start late, or items are split (pieces.cuh). Where keys do not fit, blocks had better be at
// the same keys, which stay in L2 for so long, and no item is split: a piece is at other keys than
// the items beside it. Lists that are alike name few keys together, and count as fitting. Neither
// changes a result.
#pragma once

#include <cstdint>

#include "cuda/sparse_attention/alike_lists.cuh"
#include "cuda/sparse_attention/backward_sm90/pieces.cuh"
#include "cuda/sparse_attention/backward_sm90/shared.cuh"
#include "cuda/sparse_attention/spread_start.cuh"

namespace winnow::cuda::sparse_attention::backward_sm90 {

/// Delays the blocks that have an item less than others, by up to what an item takes.
template <class T>
__device__ void delay_start(const BackwardSm90Parameters<T>& params) {
  if (!has_time_to_spare(params.items)) return;
  const auto block = static_cast<int>(blockIdx.x);
  // The least of three items, of which the last one stands for the last ones of all others: they
  // must take as long as the delay, and one long row must not delay many short ones.
  const int blocks = min(min(item_of(params, block).blocks,
                             item_of(params, block + static_cast<int>(gridDim.x)).blocks),
                         item_of(params, params.items - 1).blocks);
  constexpr int kCycles = 9000;  // of 64 keys
  spread_start(params.items, std::int64_t{blocks + 1} * kCycles);
}

/// Whether lists may be alike and it may matter: a list alone must leave room in L2, random lists
/// must differ, and with one item a thread block nothing is to gain.
__host__ __device__ inline bool may_be_alike(std::int64_t topk, std::int64_t keys,
                                             std::int64_t items, std::int64_t thread_blocks) {
  constexpr int kMostSlots = (20 << 20) / (kMaxTiles * kTileColumns * 6);
  return topk <= kMostSlots && topk <= keys / 6 && items >= 2 * thread_blocks;
}

/// Whether lists are so much alike that the keys in use at a time stay in L2. Called by all
/// threads.
template <class T>
__device__ bool are_few_keys_in_use(const BackwardSm90Parameters<T>& params) {
  return may_be_alike(params.topk, params.keys, params.items, gridDim.x) &&
         lists_are_alike<kThreads>(params);
}

/// Counts a block of 64 keys. Called by all threads of a warpgroup, of which the first one counts.
/// There is no branch for the compiler to see, which would spill registers.
__device__ inline void count_block(unsigned* progress) {
  asm volatile(
      "{\n"
      ".reg .pred counts, is_first;\n"
      ".reg .u32 thread;\n"
      "mov.u32 thread, %%tid.x;\n"
      "setp.ne.u64 counts, %0, 0;\n"
      "setp.eq.and.u32 is_first, thread, 0, counts;\n"
      "@is_first red.relaxed.gpu.global.add.u32 [%0], 1;\n"
      "}\n" ::"l"(progress)
      : "memory");
}

/// Waits until thread blocks have counted on average `lead` blocks of keys less than this one,
/// which has counted `blocks`. Called by one thread. If the others do not come, since they do not
/// run at the same time, the wait ends, and no thread block waits again.
__device__ inline void keep_pace(unsigned* progress, int blocks, int lead) {
  const unsigned awaited = gridDim.x * static_cast<unsigned>(max(blocks - lead, 0));
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      ".reg .u32 counted, polls;\n"
      "mov.u32 polls, 0;\n"
      "again:\n"
      "ld.relaxed.gpu.global.u32 counted, [%0];\n"
      "setp.ge.u32 done, counted, %1;\n"
      "@done bra end;\n"
      "nanosleep.u32 1000;\n"
      "add.u32 polls, polls, 1;\n"
      "setp.lt.u32 done, polls, 200;\n"
      "@done bra again;\n"
      "red.relaxed.gpu.global.max.u32 [%0], 0x80000000;\n"
      "end:\n"
      "}\n" ::"l"(progress),
      "r"(awaited)
      : "memory");
}

/// Called after a thread block's last item, or where nobody is to wait: others no longer do.
__device__ inline void end_pace(unsigned* progress) {
  asm volatile("red.relaxed.gpu.global.max.u32 [%0], 0x80000000;" ::"l"(progress) : "memory");
}

/// Called by all threads before the first item. Returns whether items are split: if blocks had
/// better not change items together, and items can be; if they cannot, the block is delayed.
/// Elsewhere blocks keep pace if there is a `progress`.
template <class T>
__device__ bool begin_pace(const BackwardSm90Parameters<T>& params) {
  bool is_spread = params.fits_l2;
  if (params.exchange.progress != nullptr && are_few_keys_in_use(params)) {
    if (threadIdx.x == 0) end_pace(params.exchange.progress);
    is_spread = true;
  }
  const bool is_split = is_spread && can_split(params);
  if (is_spread && !is_split) delay_start(params);
  return is_split;
}

}  // namespace winnow::cuda::sparse_attention::backward_sm90
