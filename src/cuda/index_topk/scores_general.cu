// SPDX-License-Identifier: Apache-2.0
// Scores of index_topk for every shape and type, from compute capability 8.0 on; and replay, which
// is the same for keys from a list. bf16, f16 and e4m3 use the tensor cores, f32 fp32 arithmetic.
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cuda/index_topk/kernels.h"
#include "cuda/index_topk/scores_general/fp32.cuh"
#include "cuda/index_topk/scores_general/tensor_cores.cuh"

namespace winnow::cuda::index_topk {
namespace {

using namespace general;

template <class T, int kTiles>
using ScoresOf =
    std::conditional_t<std::is_same_v<T, float>, Fp32Scores, TensorCoreScores<T, kTiles>>;

// Replay has one row a list: the tensor cores' warps are busy with two tiles at a time.
constexpr int kReplayTiles = 2;
constexpr int kPartSlots = kReplayTiles * kTileKeys;

template <class T>
__global__ void __launch_bounds__(kThreads, 1)
    index_topk_scores_kernel(const __grid_constant__ ScoreInputs inputs,
                             const __grid_constant__ Plan plan, int chunk) {
  using Scores = ScoresOf<T, 1>;
  extern __shared__ __align__(16) std::byte memory[];
  Scores scores(inputs, reinterpret_cast<typename Scores::SharedStorage&>(memory));
  wait_for_previous_grid();
  for (Share share(plan, chunk, blockIdx.x, gridDim.x, threadIdx.x % 32); !share.empty();
       share.next_group()) {
    const std::int64_t tiles = plan.tiles(share.group());
    float* const scores_of_rows = plan.scores_of_group(share.group(), chunk);
    float* const samples = scores_of_rows + plan.sample_offset(tiles);
    const std::int64_t first_row = share.group() * plan.rows_per_group;
    const Rows rows{first_row, static_cast<int>(min(std::int64_t{plan.rows_per_group},
                                                    plan.tokens - first_row))};
    scores.run(rows, {share.first_tile_of_group(), share.end_tile_of_group()},
               Neighbours{plan.first_key[share.group()], plan.keys},
               [&](int r, int tile, int i, float score, bool adds) {
                 float* const of_tile = scores_of_rows + (r * tiles + tile) * kTileKeys;
                 if (adds) score += of_tile[i];
                 of_tile[i] = score;
                 const Sampled sampled(tile, i / 16);
                 if (sampled.any() && i % 8 == sampled.row)
                   samples[(r * tiles + tile) * kTileSample + sampled.place + i % 16 / 8] = score;
               });
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads, 1)
    index_topk_replay_kernel(const __grid_constant__ ScoreInputs inputs,
                             const __grid_constant__ ReplayParameters replay) {
  using Scores = ScoresOf<T, kReplayTiles>;
  extern __shared__ __align__(16) std::byte memory[];
  Scores scores(inputs, reinterpret_cast<typename Scores::SharedStorage&>(memory));
  for (std::int64_t item = blockIdx.x; item < replay.tokens * replay.parts; item += gridDim.x) {
    const std::int64_t t = item / replay.parts;
    const int first_tile = static_cast<int>(item % replay.parts) * kReplayTiles;
    const int tiles = (replay.topk + kTileKeys - 1) / kTileKeys;
    const int length = replay.lengths == nullptr ? replay.topk : replay.lengths[t];
    const Listed keys{replay.indices + t * replay.indices_stride, min(length, replay.topk),
                      max(replay.begin[t], 0), min(replay.end[t], replay.keys)};
    float* const of_row = replay.scores + t * replay.scores_stride;
    scores.run({t, 1}, {first_tile, min(first_tile + kReplayTiles, tiles)}, keys,
               [&](int, int tile, int i, float score, bool adds) {
                 const std::int64_t slot = std::int64_t{tile} * kTileKeys + i;
                 if (slot >= replay.topk) return;
                 if (adds) score += of_row[slot];
                 of_row[slot] = keys.key(slot) < 0 ? -INFINITY : score;
               });
  }
}

/// Calls `function(T{})` with the type of the elements.
template <class Function>
auto with_type(DType dtype, Function function) {
  switch (dtype) {
    case DType::bf16:
      return function(__nv_bfloat16{});
    case DType::f16:
      return function(__half{});
    case DType::f32:
      return function(float{});
    default:
      return function(__nv_fp8_e4m3{});
  }
}

}  // namespace

ForChunk scores_general(const IndexTopkForward& args, const Execution& execution) {
  return with_type(args.q.dtype, [&]<class T>(T) -> ForChunk {
    const Step launch(
        index_topk_scores_kernel<T>,
        {.blocks = device_properties(args.q.device).multiprocessors * ScoresOf<T, 1>::kBlocksPerSm,
         .threads = kThreads,
         .shared_bytes = sizeof(typename ScoresOf<T, 1>::SharedStorage),
         .stream = execution.stream,
         .pdl = true});
    return [=, inputs = score_inputs(args)](const Plan& plan, int chunk, NodeChain* chain) {
      launch(chain, inputs, plan, chunk);
    };
  });
}

void replay(const IndexTopkForward& args, const Execution& execution) {
  const std::int64_t topk = args.indices.shape[1];
  const ReplayParameters replay{.indices = data_of<const std::int32_t>(args.indices),
                                .lengths = data_of<const std::int32_t>(args.lengths),
                                .begin = data_of<const std::int32_t>(args.begin),
                                .end = data_of<const std::int32_t>(args.end),
                                .scores = data_of<float>(args.scores),
                                .indices_stride = args.indices.stride[0],
                                .scores_stride = args.scores.stride[0],
                                .tokens = args.q.shape[0],
                                .parts = (topk + kPartSlots - 1) / kPartSlots,
                                .topk = static_cast<int>(topk),
                                .keys = static_cast<int>(args.k.shape[0])};
  with_type(args.q.dtype, [&]<class T>(T) {
    launch(index_topk_replay_kernel<T>,
           {.blocks = blocks_for(replay.tokens * replay.parts, 1),
            .threads = kThreads,
            .shared_bytes = sizeof(typename ScoresOf<T, kReplayTiles>::SharedStorage),
            .stream = execution.stream},
           score_inputs(args), replay);
  });
}

}  // namespace winnow::cuda::index_topk
