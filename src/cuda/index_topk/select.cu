// SPDX-License-Identifier: Apache-2.0
// The selection of index_topk, exact on every input.
//
// The result depends on the scores alone, not on the order in which threads run: a bound splits a
// row's keys, and equal scores at the bound are split by key. A warp handles a whole row, which has
// a slot for each of its keys, in their order. Every other row takes a thread block; see
// row_select.cuh.
#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "cuda/index_topk/kernels.h"
#include "cuda/index_topk/row_select.cuh"

namespace winnow::cuda::index_topk {
namespace {

/// Selects all that can be selected of a row that has a slot for each key, by a warp; returns how
/// many.
__device__ int select_whole(const Row& row, const Slots& slots) {
  constexpr int kLoads = 4;
  constexpr int kBlockKeys = 32 * 4;  // that the warp reads together, four neighbours a lane
  const std::uint32_t own = threadIdx.x % 32 * 4;
  int written = 0;
  for (std::uint32_t base = 0; base < row.count(); base += kLoads * kBlockKeys) {
    float4 fours[kLoads];
#pragma unroll
    for (int b = 0; b < kLoads; ++b) {
      const std::uint32_t place = base + b * kBlockKeys + own;
      fours[b] = place < row.count() ? row.four_scores(place) : float4{};
    }
#pragma unroll
    for (int b = 0; b < kLoads; ++b) {
      const std::uint32_t place = base + b * kBlockKeys + own;
      const float4 four = row.in_window(fours[b], place);
      const float scores[4] = {four.x, four.y, four.z, four.w};
      std::uint32_t selected = 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) selected += can_be_selected(scores[j]) ? 1 : 0;
      const int key = row.first + static_cast<int>(place);
      if (__all_sync(kAllLanes, selected == 4)) {
        slots.set_four(written + static_cast<int>(own), key, scores);
        written += kBlockKeys;
        continue;
      }
      const Prefix prefix = warp_prefix_sum(selected);
      int slot = written + static_cast<int>(prefix.before);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (can_be_selected(scores[j])) slots.set(slot++, key + j, scores[j]);
      }
      written += static_cast<int>(prefix.all);
    }
  }
  return written;
}

/// Whether the first key comes before the second: larger scores first, equal ones by key.
__device__ bool stands_before(float score, int key, float other_score, int other_key) {
  return score > other_score || (score == other_score && key < other_key);
}

/// Sorts by score with Batcher's merge exchange. For any length its comparisons are those of the
/// next power of two that fall within it.
__device__ void sort_by_score(std::int32_t* keys, float* scores, int count) {
  int top = 1;
  while (top < count) top *= 2;
  for (int p = top / 2; p > 0; p /= 2) {
    int q = top / 2;
    int r = 0;
    int d = p;
    while (true) {
      __syncthreads();
      for (int i = threadIdx.x; i + d < count; i += kThreads) {
        if ((i & p) != r || !stands_before(scores[i + d], keys[i + d], scores[i], keys[i]))
          continue;
        const float score = scores[i];
        const std::int32_t key = keys[i];
        scores[i] = scores[i + d];
        keys[i] = keys[i + d];
        scores[i + d] = score;
        keys[i + d] = key;
      }
      if (q == p) break;
      d = q - p;
      q /= 2;
      r = p;
    }
  }
  __syncthreads();
}

__device__ Slots slots_of(const SelectOutputs& outputs, std::int64_t t) {
  float* const scores = outputs.scores != nullptr ? held(outputs.scores + t * outputs.scores_stride)
                        : outputs.by_score
                            ? outputs.scratch + blockIdx.x * std::int64_t{outputs.topk}
                            : nullptr;
  return {held(outputs.indices + t * outputs.indices_stride), scores, outputs.topk};
}

/// The rows [first, end) of a chunk.
struct Rows {
  std::int64_t first;
  std::int64_t end;
};

__device__ bool is_whole(const Plan& plan, const SelectOutputs& outputs, std::int64_t t) {
  return !outputs.by_score && plan.window_end(t) - plan.window_begin(t) <= outputs.topk;
}

/// Selects from the rows that a warp can handle, one after another.
__device__ void select_whole_rows(const Plan& plan, int chunk, const SelectOutputs& outputs,
                                  Rows rows) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t step = std::int64_t{gridDim.x} * kWarps;
  for (std::int64_t t = rows.first + std::int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
       t < rows.end; t += step) {
    if (plan.is_done(t) || !is_whole(plan, outputs, t)) continue;
    const Slots slots = slots_of(outputs, t);
    const int written = select_whole(row_of(plan, chunk, t), slots);
    slots.clear_from(written, lane, 32);
    if (outputs.lengths != nullptr && lane == 0) outputs.lengths[t] = written;
  }
}

template <int kEach>
__device__ void select_row(RowStorage<kEach>& shared, const Plan& plan, int chunk,
                           const SelectOutputs& outputs, std::int64_t t) {
  const Slots slots = slots_of(outputs, t);
  const int written = select(shared, row_of(plan, chunk, t), slots);
  slots.clear_from(written, static_cast<int>(threadIdx.x), kThreads);
  if (outputs.by_score) sort_by_score(slots.indices, slots.scores, written);
  if (outputs.lengths != nullptr && threadIdx.x == 0) outputs.lengths[t] = written;
  __syncthreads();
}

/// kEach: the most candidates that a thread holds.
template <int kEach>
__global__ void __launch_bounds__(kThreads, kEach > 16 ? 2 : 4)
    index_topk_select_kernel(const __grid_constant__ Plan plan, int chunk,
                             const __grid_constant__ SelectOutputs outputs) {
  extern __shared__ __align__(16) std::byte memory[];
  RowStorage<kEach>& shared = *reinterpret_cast<RowStorage<kEach>*>(memory);

  wait_for_previous_grid();
  const std::int64_t group_rows = plan.rows_per_group;
  const Rows rows{plan.first_group[chunk] * group_rows,
                  min(plan.first_group[chunk + 1] * group_rows, plan.tokens)};
  select_whole_rows(plan, chunk, outputs, rows);
  // The block takes every gridDim.x-th of the other rows, from the last one on, whose scores were
  // written last and are still in L2. All of its warps examine the same 32 rows at a time.
  const std::int64_t step = gridDim.x;
  for (std::int64_t last = rows.end - 1 - blockIdx.x; last >= rows.first; last -= 32 * step) {
    const std::int64_t t = last - threadIdx.x % 32 * step;
    unsigned own = __ballot_sync(
        kAllLanes, t >= rows.first && !plan.is_done(t) && !is_whole(plan, outputs, t));
    for (; own != 0; own &= own - 1) {
      const int number = __ffs(static_cast<int>(own)) - 1;
      select_row(shared, plan, chunk, outputs, last - number * step);
    }
  }
}

/// Whether 4096 candidates are enough.
bool has_few_slots(const IndexTopkForward& args) {
  return args.indices.shape[1] <= kMostGuessed<16>;
}

std::int64_t blocks_of(const IndexTopkForward& args) {
  const int at_once = has_few_slots(args) ? 4 : 2;
  return std::min<std::int64_t>(at_once * device_properties(args.q.device).multiprocessors,
                                args.q.shape[0]);
}

template <int kEach>
ForChunk launcher_for(const IndexTopkForward& args, float* scratch, const Execution& execution) {
  const Step launch(index_topk_select_kernel<kEach>, {.blocks = blocks_of(args),
                                                      .threads = kThreads,
                                                      .shared_bytes = sizeof(RowStorage<kEach>),
                                                      .stream = execution.stream,
                                                      .pdl = true});
  const SelectOutputs outputs{.indices = data_of<std::int32_t>(args.indices),
                              .lengths = data_of<std::int32_t>(args.lengths),
                              .scores = data_of<float>(args.scores),
                              .scratch = scratch,
                              .indices_stride = args.indices.stride[0],
                              .scores_stride = args.scores ? args.scores.stride[0] : 0,
                              .topk = static_cast<int>(args.indices.shape[1]),
                              .by_score = args.order == SlotOrder::by_score};
  return
      [=](const Plan& plan, int chunk, NodeChain* chain) { launch(chain, plan, chunk, outputs); };
}

}  // namespace

std::int64_t select_scratch(const IndexTopkForward& args) {
  if (args.order != SlotOrder::by_score || args.scores) return 0;
  return blocks_of(args) * args.indices.shape[1];
}

ForChunk select(const IndexTopkForward& args, float* scratch, const Execution& execution) {
  return has_few_slots(args) ? launcher_for<16>(args, scratch, execution)
                             : launcher_for<32>(args, scratch, execution);
}

}  // namespace winnow::cuda::index_topk
