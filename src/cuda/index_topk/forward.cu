// SPDX-License-Identifier: Apache-2.0
// index_topk, forward: first the rows whose slots need no scores, then a plan, then chunk by chunk
// the scores of some rows and the selection from them.
//
// The scores of a chunk are the only large buffer, and the workspace limit bounds it. How many rows
// fit depends on the windows and is known on the device only. So there are as many chunks as the
// longest possible windows need: the first few are launched, and end at once if they are not
// needed; the device counts the others.
#include <algorithm>

#include <cub/block/block_scan.cuh>

#include "backend_operators.h"
#include "core/refusals.h"
#include "cuda/index_topk/kernels.h"

namespace winnow::cuda {
namespace {

using namespace index_topk;

constexpr int kPlanThreads = 512;
// Chunks that are launched whether they have rows or not, where there may be more than a few.
constexpr int kDirectChunks = 4;
constexpr int kMostDirectChunks = 16;

/// The scales that the plan looks at, so that the scores need not do it; null: none. In calls with
/// more than 32 heads (scores_sm90.cu) that gains 4 % at 128k keys, and loses 1 % at 32k and 4 % at
/// 4k. Few rows gain less than it costs.
const float* checked_scales(const IndexTopkForward& args) {
  const bool pays = args.q.shape[0] >= 1024 && args.q.shape[1] > 32 && args.k.shape[0] >= 65536;
  return pays ? data_of<const float>(args.k_scale) : nullptr;
}

/// The sizes of the plan's arrays, which follow from the shapes.
struct Sizes {
  std::int64_t groups;
  std::int64_t group_tiles;  // the most that a group can have
  std::int64_t tile_bytes;
  std::int64_t chunk_tiles;
  std::int64_t chunks;
  std::int64_t scratch;
  std::int64_t magnitudes;  // of keys
  std::int64_t done;

  std::size_t score_bytes() const {
    // The set-up tile counted for a chunk's last group stores no scores.
    return static_cast<std::size_t>((chunk_tiles + group_tiles - 1) * tile_bytes);
  }
  std::size_t workspace_bytes() const {
    return Workspace::bytes({(groups + 1) * sizeof(std::int64_t), groups * sizeof(std::int32_t),
                             (chunks + 1) * sizeof(std::int32_t), sizeof(std::int32_t),
                             kRemainingScratch * sizeof(std::int32_t), scratch * sizeof(float),
                             magnitudes * sizeof(float), done * sizeof(std::uint8_t),
                             score_bytes()});
  }
};

Sizes sizes_of(const IndexTopkForward& args, int rows_per_group, const Execution& execution) {
  Sizes sizes{};
  sizes.groups = (args.q.shape[0] + rows_per_group - 1) / rows_per_group;
  const std::int64_t keys = args.k.shape[0];
  sizes.group_tiles = keys == 0 ? 0 : (keys + kTileKeys - 1) / kTileKeys + 1;
  sizes.tile_bytes = std::int64_t{rows_per_group} * kTileFloats * 4;
  sizes.scratch = select_scratch(args);
  sizes.magnitudes = has_whole_windows(args) ? keys : 0;
  sizes.done = has_whole_windows(args) ? args.q.shape[0] : 0;
  const std::int64_t all_tiles = std::max<std::int64_t>(sizes.groups * sizes.group_tiles, 1);
  sizes.chunk_tiles = all_tiles;
  sizes.chunks = 1;
  // Repeated, because the array of chunks grows with their number.
  while (sizes.workspace_bytes() > execution.workspace_limit && sizes.chunk_tiles > 1) {
    const std::size_t over = sizes.workspace_bytes() - execution.workspace_limit;
    const auto over_tiles =
        static_cast<std::int64_t>((over + sizes.tile_bytes - 1) / sizes.tile_bytes);
    sizes.chunk_tiles = std::max<std::int64_t>(sizes.chunk_tiles - over_tiles, 1);
    sizes.chunks = (all_tiles + sizes.chunk_tiles - 1) / sizes.chunk_tiles;
  }
  return sizes;
}

/// The keys that a group's rows see, of those rows that need scores.
struct GroupKeys {
  int first = 0;  // a multiple of 4
  int end = 0;    // not after the first: none
  __device__ std::int64_t tiles() const {
    return first < end ? (std::int64_t{end} - first + kTileKeys - 1) / kTileKeys + 1 : 0;
  }
};

/// No load waits for another row's, so that those of a group are in flight together.
__device__ GroupKeys keys_of(const Plan& plan, std::int64_t group) {
  bool needs_scores[kMaxRowsPerGroup];
#pragma unroll
  for (int r = 0; r < kMaxRowsPerGroup; ++r) {
    const std::int64_t t = group * plan.rows_per_group + r;
    needs_scores[r] = r < plan.rows_per_group && t < plan.tokens && !plan.is_done(t);
  }
  int low = plan.keys;
  int high = 0;
#pragma unroll
  for (int r = 0; r < kMaxRowsPerGroup; ++r) {
    const std::int64_t t = group * plan.rows_per_group + r;
    const int begin = needs_scores[r] ? plan.window_begin(t) : 0;
    const int end = needs_scores[r] ? plan.window_end(t) : 0;
    if (begin >= end) continue;
    low = min(low, begin);
    high = max(high, end);
  }
  return low < high ? GroupKeys{low / 4 * 4, high} : GroupKeys{};
}

/// Writes each group's keys and tiles. A thread has the loads of kEach groups in flight.
template <int kEach>
__device__ void plan_groups(const Plan& plan) {
  using Scan = cub::BlockScan<std::int64_t, kPlanThreads>;
  __shared__ typename Scan::TempStorage scan;
  std::int64_t before = 0;
  for (std::int64_t base = 0; base < plan.groups; base += kEach * kPlanThreads) {
    GroupKeys keys[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) keys[i] = keys_of(plan, base + i * kPlanThreads + threadIdx.x);
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const std::int64_t group = base + i * kPlanThreads + threadIdx.x;
      if (base + i * kPlanThreads >= plan.groups) break;
      std::int64_t start;
      std::int64_t all;
      Scan(scan).ExclusiveSum(keys[i].tiles(), start, all);
      if (group < plan.groups) {
        plan.first_tile[group] = before + start;
        plan.first_key[group] = keys[i].first;
      }
      before += all;
      __syncthreads();
    }
  }
  if (threadIdx.x == 0) plan.first_tile[plan.groups] = before;
  __syncthreads();
}

/// Whether any of the scales does not commute with max. Null: not looked at, so there may be some.
__device__ bool has_odd_scales(const float* k_scale, int keys) {
  if (k_scale == nullptr) return true;
  bool is_odd = false;
#pragma unroll 8
  for (int s = static_cast<int>(threadIdx.x); s < keys; s += kPlanThreads)
    is_odd |= !commutes_with_max(__ldg(k_scale + s));
  return __syncthreads_or(is_odd) != 0;
}

/// Makes the plan in one block: each group's keys and tiles, and the chunk that it belongs to.
__global__ void __launch_bounds__(kPlanThreads)
    index_topk_plan_kernel(Plan plan, const float* k_scale) {
  wait_for_previous_grid();
  if (plan.groups <= kPlanThreads)
    plan_groups<1>(plan);
  else
    plan_groups<4>(plan);
  // Find the first group that begins in a chunk or after it.
  for (int chunk = threadIdx.x; chunk <= plan.chunks; chunk += kPlanThreads) {
    std::int64_t low = 0;
    std::int64_t high = plan.groups;
    if (chunk == plan.chunks) low = high;
    while (low < high && chunk > 0) {
      const std::int64_t middle = low + (high - low) / 2;
      if (plan.first_tile[middle] < chunk * plan.chunk_tiles) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    plan.first_group[chunk] = static_cast<std::int32_t>(low);
  }
  const bool is_odd = has_odd_scales(k_scale, plan.keys);
  if (threadIdx.x == 0) *plan.odd_scales = is_odd;
}

using MakeScores = ForChunk (*)(const IndexTopkForward&, const Execution&);

void select_all(const IndexTopkForward& args, int rows_per_group, MakeScores make_scores,
                const Execution& execution) {
  const Sizes sizes = sizes_of(args, rows_per_group, execution);
  const DeviceGuard guard(args.q.device);
  Workspace workspace(execution, sizes.workspace_bytes());
  std::uint8_t* const done = sizes.done > 0 ? workspace.take<std::uint8_t>(sizes.done) : nullptr;
  const Plan plan{
      .first_tile = workspace.take<std::int64_t>(sizes.groups + 1),
      .first_key = workspace.take<std::int32_t>(sizes.groups),
      .first_group = workspace.take<std::int32_t>(sizes.chunks + 1),
      .scores = workspace.take<float>(static_cast<std::int64_t>(sizes.score_bytes() / 4)),
      .begin = data_of<const std::int32_t>(args.begin),
      .end = data_of<const std::int32_t>(args.end),
      .done = done,
      .odd_scales = workspace.take<std::int32_t>(1),
      .tokens = args.q.shape[0],
      .groups = sizes.groups,
      .chunk_tiles = sizes.chunk_tiles,
      .chunks = static_cast<int>(sizes.chunks),
      .keys = static_cast<int>(args.k.shape[0]),
      .rows_per_group = rows_per_group,
  };
  float* const scratch = workspace.take<float>(sizes.scratch);
  auto* const remaining = workspace.take<std::int32_t>(kRemainingScratch);
  if (done != nullptr) {
    float* const magnitudes = workspace.take<float>(sizes.magnitudes);
    take_whole_windows(args, plan, magnitudes, done, execution);
  }
  launch(index_topk_plan_kernel,
         {.blocks = 1, .threads = kPlanThreads, .stream = execution.stream, .pdl = true}, plan,
         checked_scales(args));
  const ForChunk scores_of = make_scores(args, execution);
  const ForChunk select_from = select(args, scratch, execution);
  const int direct = plan.chunks > kMostDirectChunks ? kDirectChunks : plan.chunks;
  for (int chunk = 0; chunk < direct; ++chunk) {
    scores_of(plan, chunk, nullptr);
    select_from(plan, chunk, nullptr);
  }
  if (direct < plan.chunks)
    for_remaining_chunks(plan, direct, scores_of, select_from, remaining, args.q.device, execution);
}

std::string why_not_sizes(const IndexTopkForward& args, int rows_per_group,
                          const Execution& execution) {
  if (args.replay) return {};
  const Sizes sizes = sizes_of(args, rows_per_group, execution);
  constexpr std::int64_t kMostGroups = std::int64_t{1} << 31;
  if (sizes.groups >= kMostGroups) return refusal::takes_fewer_rows;
  return over_limit(sizes.workspace_bytes(), execution);
}

std::size_t workspace_bytes_for(const IndexTopkForward& args, int rows_per_group,
                                const Execution& execution) {
  if (args.replay || args.q.shape[0] == 0) return 0;
  return sizes_of(args, rows_per_group, execution).workspace_bytes();
}

std::string why_not_sm90(const IndexTopkForward& args, const Execution& execution) {
  if (args.replay) return refusal::no_replay;
  std::string reason = why_not_scores_sm90(args);
  return reason.empty() ? why_not_sizes(args, rows_per_group_sm90(args), execution) : reason;
}
std::size_t workspace_bytes_sm90(const IndexTopkForward& args, const Execution& execution) {
  return workspace_bytes_for(args, rows_per_group_sm90(args), execution);
}
void run_sm90(const IndexTopkForward& args, const Execution& execution) {
  if (args.q.shape[0] == 0) return;
  select_all(args, rows_per_group_sm90(args), scores_sm90, execution);
}

std::string why_not_general(const IndexTopkForward& args, const Execution& execution) {
  if (args.q.dtype == DType::f64) return refusal::no_f64;
  return why_not_sizes(args, kRowsPerGroupGeneral, execution);
}
std::size_t workspace_bytes_general(const IndexTopkForward& args, const Execution& execution) {
  return workspace_bytes_for(args, kRowsPerGroupGeneral, execution);
}
void run_general(const IndexTopkForward& args, const Execution& execution) {
  if (args.q.shape[0] == 0) return;
  if (args.replay) {
    const DeviceGuard guard(args.q.device);
    replay(args, execution);
  } else {
    select_all(args, kRowsPerGroupGeneral, scores_general, execution);
  }
}

}  // namespace

Kernels<IndexTopkForward> kernels(std::type_identity<IndexTopkForward>) {
  static constexpr Kernel<IndexTopkForward> kKernels[] = {
      {"sm90", why_not_sm90, workspace_bytes_sm90, run_sm90},
      {"general", why_not_general, workspace_bytes_general, run_general}};
  return kKernels;
}

}  // namespace winnow::cuda
