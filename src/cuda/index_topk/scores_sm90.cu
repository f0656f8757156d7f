// SPDX-License-Identifier: Apache-2.0
// Scores of index_topk on Hopper: rows of 128 elements, up to 64 heads, bf16, f16 and e4m3.
//
// A product has 64 keys as its rows and 256 columns, which are the heads of a group of queries: 8
// queries of up to 32 heads, or 4 of up to 64. Columns stand so that a lane holds all heads of its
// queries: relu, weights and the sum over heads happen in its registers.
//   warpgroup 0     one warp finds the tiles of a group that are next, brings its weights, and has
//                   Q copied, once a group, and keys, 128 at a time, in stages
//   warpgroups 1, 2 products and sums of the first and the last 64 keys of a tile, in turns: while
//                   one sums up, the matrix units work for the other
// Each thread block computes an equal and contiguous part of a chunk; its keys are read
// about when other blocks read them, out of the L2 cache. Q of the next group comes while the last
// keys of a group are used. Shared memory: twice 64 KiB of Q and three times 32 KiB of keys; with
// e4m3 half of that, and a stage more. Runs against the matrix units.
#include <cstddef>

#include "core/refusals.h"
#include "cuda/common/tensor_map.h"
#include "cuda/hopper/barrier.cuh"
#include "cuda/hopper/tensor_copy.cuh"
#include "cuda/hopper/wgmma.cuh"
#include "cuda/index_topk/kernels.h"

namespace winnow::cuda::index_topk {
namespace {

using namespace winnow::hopper;

constexpr int kDim = 128;
constexpr int kColumns = 256;  // of a product
constexpr int kRows = 64;      // of a product
constexpr int kGroups = 2;     // whose queries are in shared memory
template <class T>
constexpr int kStages = sizeof(T) == 1 ? 4 : 3;
constexpr int kWarpgroup = 128;
constexpr int kThreads = 3 * kWarpgroup;
constexpr int kCopyRegisters = 72;
constexpr int kMathRegisters = 216;

template <class T>
constexpr int kTiles = kDim* static_cast<int>(sizeof(T)) / kTileRowBytes;  // side by side

/// Rows of kDim elements, as tiles of the products' operands.
template <class T, int kCount>
struct Operand {
  std::byte tiles[kTiles<T>][kCount * kTileRowBytes];
};

/// Tiles of a group that a block computes.
struct Unit {
  std::int64_t group;
  std::int64_t scores;  // where those of the group begin in the buffer
  std::int64_t width;   // from one row to the next
  int first_key;
  int first, behind;  // tiles, counted in the group; behind is 0 when there are no more units
};

template <class T>
struct SharedStorage {
  Operand<T, kTileKeys> keys[kStages<T>];
  Operand<T, kColumns> queries[kGroups];
  float weights[kGroups][kColumns];
  Unit units[kGroups];
  Barrier full[kStages<T>];
  Barrier free[kStages<T>];
  Barrier queries_full[kGroups];  // and their weights and unit
  Barrier queries_free[kGroups];
};
static_assert(sizeof(SharedStorage<__nv_bfloat16>) <= 227 * 1024);

/// Which query of a group and which of its heads a column of a product is. Of each 8 columns a lane
/// holds two neighbours: two queries, or two parts of the heads of one.
template <int kHeads>
struct Column {
  static constexpr int kParts = kHeads / 32;
  int query;
  int part;
  int number;  // in its part

  __device__ explicit Column(int column)
      : query(column % 8 / kParts), part(column % kParts), number(column / 8) {}
  /// An odd number of heads in two parts: the last of the first part is the first of the second,
  /// and does not count.
  __device__ bool has_head(int heads) const { return number < (heads + part) / kParts; }
  __device__ int head(int heads) const { return part * (heads / kParts) + number; }
};

/// Which of kCount buffers comes next, and how often it has come before.
template <int kCount>
struct Turn {
  int stage = 0;
  int round = 0;
  __device__ void next() {
    if (++stage == kCount) {
      stage = 0;
      ++round;
    }
  }
};

/// A warp brings the weights of each group, and has its queries and keys copied.
template <class T, int kHeads>
class Bringer {
 public:
  __device__ Bringer(const CUtensorMap& q, const CUtensorMap& k, const ScoreInputs& inputs,
                     const Plan& plan, int chunk, SharedStorage<T>& shared)
      : q_(q),
        k_(k),
        inputs_(inputs),
        plan_(plan),
        chunk_(chunk),
        shared_(shared),
        share_(plan, chunk, blockIdx.x, gridDim.x, lane_) {}

  __device__ void bring() {
    Unit unit = unit_of_group();
    while (unit.behind > 0) {
      bring_queries(unit);
      // The next unit is found while keys are on their way.
      const int soon = min(unit.first + kStages<T>, unit.behind);
      copy_keys(unit, unit.first, soon);
      share_.next_group();
      const Unit next = unit_of_group();
      copy_keys(unit, soon, unit.behind);
      unit = next;
    }
    bring_end();
  }

 private:
  static constexpr int kQueries = kColumns / kHeads;
  static constexpr int kTileColumnsOfT = kTileRowBytes / static_cast<int>(sizeof(T));

  /// The unit of the share's group, if there is one; loads its weights.
  __device__ Unit unit_of_group() {
    if (share_.empty()) return {};
    const std::int64_t group = share_.group();
#pragma unroll
    for (int i = 0; i < kColumns / 32; ++i) {
      const Column<kHeads> column(i * 32 + lane_);
      const std::int64_t t = group * kQueries + column.query;
      const bool is_there = t < plan_.tokens && column.has_head(inputs_.heads);
      weights_[i] =
          is_there ? inputs_.weights[t * inputs_.weights_row + column.head(inputs_.heads)] : 0.0f;
    }
    return {.group = group,
            .scores = plan_.scores_of_group(group, chunk_) - plan_.scores,
            .width = plan_.row_width(group),
            .first_key = plan_.first_key[group],
            .first = share_.first_of_group(),
            .behind = share_.behind_of_group()};
  }
  /// Every lane that writes waits and arrives itself. The queries first: they take longest.
  __device__ void bring_queries(const Unit& unit) {
    Barrier& full = shared_.queries_full[group_.stage];
    shared_.queries_free[group_.stage].wait(group_.round - 1);
    if (lane_ == 0) {
      full.expect(sizeof(shared_.queries[0]));
      const auto first_row = static_cast<int>(unit.group * kQueries);
      for (int i = 0; i < kTiles<T>; ++i) {
        copy_box(shared_.queries[group_.stage].tiles[i], q_, full, i * kTileColumnsOfT, 0,
                 first_row, 0);
      }
      shared_.units[group_.stage] = unit;
    }
#pragma unroll
    for (int i = 0; i < kColumns / 32; ++i)
      shared_.weights[group_.stage][i * 32 + lane_] = weights_[i];
    full.arrive();
    group_.next();
  }
  /// A unit without tiles.
  __device__ void bring_end() {
    shared_.queries_free[group_.stage].wait(group_.round - 1);
    if (lane_ == 0) shared_.units[group_.stage] = {};
    shared_.queries_full[group_.stage].arrive();
  }
  __device__ void copy_keys(const Unit& unit, int first, int behind) {
    if (lane_ == 0) {
      for (int tile = first; tile < behind; ++tile, turn_.next()) {
        Barrier& full = shared_.full[turn_.stage];
        shared_.free[turn_.stage].wait(turn_.round - 1);
        full.arrive_and_expect(sizeof(shared_.keys[0]));
        for (int i = 0; i < kTiles<T>; ++i) {
          copy_box(shared_.keys[turn_.stage].tiles[i], k_, full, i * kTileColumnsOfT,
                   unit.first_key + tile * kTileKeys);
        }
      }
    }
    __syncwarp();
  }

  const CUtensorMap& q_;
  const CUtensorMap& k_;
  const ScoreInputs& inputs_;
  const Plan& plan_;
  const int chunk_;
  SharedStorage<T>& shared_;
  const int lane_ = static_cast<int>(threadIdx.x) % 32;
  Share share_;
  float weights_[kColumns / 32];
  Turn<kStages<T>> turn_;
  Turn<kGroups> group_;
};

// Named barriers. The two warpgroups take turns at the matrix units.
__device__ inline void wait_for_turn(int side) {
  if (side == 0) {
    sync_warps<1, 2 * kWarpgroup>();
  } else {
    sync_warps<2, 2 * kWarpgroup>();
  }
}
__device__ inline void give_turn(int side) {
  if (side == 0) {
    arrive_warps<1, 2 * kWarpgroup>();
  } else {
    arrive_warps<2, 2 * kWarpgroup>();
  }
}

/// The weights of the columns that a lane holds, 8 i + 2 c and the next.
__device__ inline void load_weights(float (&weights)[kColumns / 4], const float (&from)[kColumns]) {
#pragma unroll
  for (int i = 0; i < kColumns / 8; ++i) {
    const float2 pair = *reinterpret_cast<const float2*>(&from[8 * i + threadIdx.x % 4 * 2]);
    weights[2 * i] = pair.x;
    weights[2 * i + 1] = pair.y;
  }
}

/// Of the queries that a lane holds, where the scores of the next tile go.
template <int kHeads>
using Targets = float * [kColumns / kHeads / 4];

/// sum_h weights * max(products, 0) of this warp's 16 keys and all queries, into the buffer.
/// kPadded: there are fewer than kHeads heads; the zeros of the others make NaN of infinite keys.
template <int kHeads, bool kPadded>
__device__ void store_scores(float (&products)[128], const float (&weights)[kColumns / 4],
                             const float (&scale)[2], int heads, Targets<kHeads>& to) {
  float sums[2][2] = {};  // of two neighbouring columns, and of key row lane / 4 and of that + 8
#pragma unroll
  for (int i = 0; i < kColumns / 8; ++i) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      if (kPadded && !Column<kHeads>(8 * i + j).has_head(heads)) continue;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float product = positive_part(products[4 * i + 2 * half + j]);
        sums[j][half] = fmaf(weights[2 * i + j], product, sums[j][half]);
      }
    }
  }
  constexpr int kLaneQueries = kColumns / kHeads / 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if constexpr (kLaneQueries == 1) sums[0][half] += sums[1][half];
#pragma unroll
    for (int query = 0; query < kLaneQueries; ++query)
      to[query][8 * half] = sums[query][half] * scale[half];
  }
#pragma unroll
  for (int query = 0; query < kLaneQueries; ++query) to[query] += kTileKeys;
}

/// Of the two keys whose products a lane holds.
template <bool kScaled>
__device__ void load_scales(float (&scale)[2], const ScoreInputs& inputs, const Plan& plan,
                            std::uint32_t key) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const std::uint32_t s = key + 8 * half;
    const bool is_key = s < static_cast<std::uint32_t>(plan.keys);
    scale[half] = kScaled && is_key ? __ldg(inputs.k_scale + s) : 1.0f;
  }
}
/// A scale that does not commute with max (zero, negative, infinite, NaN) goes into the products
/// instead of the sums.
__device__ inline void scale_products(float (&products)[128], float (&scale)[2]) {
  const auto commutes = [](float x) { return x > 0 && x <= 3.4e38f; };
  if (__all_sync(0xffffffffu, commutes(scale[0]) && commutes(scale[1]))) return;
  // Each key by itself: what is rounded does not depend on its neighbours.
  const float factor[2] = {commutes(scale[0]) ? 1.0f : scale[0],
                           commutes(scale[1]) ? 1.0f : scale[1]};
#pragma unroll
  for (int i = 0; i < 128; ++i) products[i] *= factor[i / 2 % 2];
#pragma unroll
  for (int half = 0; half < 2; ++half) scale[half] = commutes(scale[half]) ? scale[half] : 1.0f;
}

/// Keeps the compiler from putting off a descriptor until this warpgroup has its turn. The upper
/// half is constant.
__device__ inline void compute_now(std::uint64_t& descriptor) {
  auto low = static_cast<std::uint32_t>(descriptor);
  asm volatile("" : "+r"(low));
  descriptor = descriptor >> 32 << 32 | low;
}

template <class T, int kHeads, bool kPadded>
__device__ void compute(const ScoreInputs& inputs, const Plan& plan, SharedStorage<T>& shared) {
  constexpr bool kScaled = sizeof(T) == 1;
  const int side = static_cast<int>(threadIdx.x) / kWarpgroup - 1;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int first_row = side * kRows + (static_cast<int>(threadIdx.x) % kWarpgroup) / 32 * 16;
  Turn<kStages<T>> turn;
  if (side == 1) give_turn(0);
  for (Turn<kGroups> group;; group.next()) {
    float weights[kColumns / 4];
    shared.queries_full[group.stage].wait(group.round);
    const Unit& unit = shared.units[group.stage];
    const int behind = unit.behind;
    if (behind == 0) break;
    load_weights(weights, shared.weights[group.stage]);
    const int first_key = unit.first_key;
    int tile = unit.first;
    constexpr int kLaneQueries = kColumns / kHeads / 4;
    Targets<kHeads> to;
#pragma unroll
    for (int query = 0; query < kLaneQueries; ++query) {
      to[query] = plan.scores + unit.scores + (lane % 4 * kLaneQueries + query) * unit.width +
                  std::int64_t{tile} * kTileKeys + first_row + lane / 4;
    }
    std::uint64_t queries[kTiles<T>];
#pragma unroll
    for (int i = 0; i < kTiles<T>; ++i) {
      queries[i] = row_contracted(shared_address(shared.queries[group.stage].tiles[i]));
      compute_now(queries[i]);
    }
    for (; tile < behind; ++tile, turn.next()) {
      std::uint64_t keys[kTiles<T>];
#pragma unroll
      for (int i = 0; i < kTiles<T>; ++i) {
        keys[i] = row_contracted(
            shared_address(shared.keys[turn.stage].tiles[i] + side * kRows * kTileRowBytes));
        compute_now(keys[i]);
      }
      shared.full[turn.stage].wait(turn.round);
      wait_for_turn(side);
      float products[128];
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < kTiles<T>; ++i) {
#pragma unroll
        for (int j = 0; j < kTileRowBytes / 32; ++j) {
          // Tiles begin where these bits are 0.
          multiply_64x256_rows<T>(products, keys[i] | j * kNext16InRow,
                                  queries[i] | j * kNext16InRow, i + j > 0);
        }
      }
      wgmma_commit();
      give_turn(1 - side);
      // Only now: whoever has the turn must not wait for memory.
      float scale[2];
      load_scales<kScaled>(scale, inputs, plan,
                           first_key + tile * kTileKeys + first_row + lane / 4);
      wgmma_wait<0>();
      if (lane == 0) shared.free[turn.stage].arrive();
      if (tile + 1 == behind) shared.queries_free[group.stage].arrive();
      if constexpr (kScaled) scale_products(products, scale);
      store_scores<kHeads, kPadded>(products, weights, scale, inputs.heads, to);
    }
  }
  if (side == 0) wait_for_turn(0);  // the last one that was given
}

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
    constexpr int kMathWarps = 2 * kWarpgroup / 32;
    for (int i = 0; i < kStages<T>; ++i) {
      shared.full[i].init(1);
      shared.free[i].init(kMathWarps);
    }
    for (int i = 0; i < kGroups; ++i) {
      shared.queries_full[i].init(32);
      shared.queries_free[i].init(2 * kWarpgroup);
    }
    fence_barrier_init();
  }
  __syncthreads();
  wait_for_launch_before();
  if (plan.first_tile[plan.first_group[chunk]] == plan.first_tile[plan.first_group[chunk + 1]])
    return;
  if (threadIdx.x < kWarpgroup) {
    lower_registers<kCopyRegisters>();
    if (threadIdx.x < 32) {
      Bringer<T, kHeads>(q, k, inputs, plan, chunk, shared).bring();
    }
  } else {
    set_registers<kMathRegisters>();
    compute<T, kHeads, kPadded>(inputs, plan, shared);
  }
}

std::uint32_t parts_of(std::int64_t heads) { return heads <= 32 ? 1 : 2; }

/// q in the order of a product's columns: number of the head in its part, query, part; see Column.
/// Strides of the copy engine need not be in the order of their sizes.
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
ForChunk launcher_for(const IndexTopkForward& args, const Plan& plan, const Execution& execution) {
  const auto heads = static_cast<int>(args.q.shape[1]);
  const std::uint32_t columns = kTileRowBytes / sizeof(T);
  const Launcher launch(heads == 32   ? index_topk_scores_kernel<T, 32, false>
                        : heads == 64 ? index_topk_scores_kernel<T, 64, false>
                        : heads < 32  ? index_topk_scores_kernel<T, 32, true>
                                      : index_topk_scores_kernel<T, 64, true>,
                        {.blocks = device_properties(args.q.device).multiprocessors,
                         .threads = kThreads,
                         .shared_bytes = sizeof(SharedStorage<T>),
                         .stream = execution.stream,
                         .early = true});
  const CUtensorMap q =
      make_tensor_map(by_column(args.q), {32, 8 / parts_of(heads), parts_of(heads), columns});
  const CUtensorMap k = make_tensor_map(args.k, {kTileKeys, columns});
  return [=, inputs = score_inputs(args)](int chunk) { launch(q, k, inputs, plan, chunk); };
}

}  // namespace

int rows_per_group_sm90(const IndexTopkForward& args) { return args.q.shape[1] <= 32 ? 8 : 4; }

ForChunk scores_sm90(const IndexTopkForward& args, const Plan& plan, const Execution& execution) {
  if (args.k.shape[0] == 0) return [](int) {};
  switch (args.q.dtype) {
    case DType::bf16:
      return launcher_for<__nv_bfloat16>(args, plan, execution);
    case DType::f16:
      return launcher_for<__half>(args, plan, execution);
    default:
      return launcher_for<__nv_fp8_e4m3>(args, plan, execution);
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
