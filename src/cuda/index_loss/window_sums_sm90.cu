// SPDX-License-Identifier: Apache-2.0
// Products over whole windows on Hopper, bf16 and f16: the lse of attention, its probabilities
// summed over heads (rows of 576 or 512 channels), and the indexer's scores (128 channels).
//
// A thread block is persistent and takes every gridDim.x-th pair of neighbouring rows, with up to
// 64 heads of each; more heads are more passes.
//
// clang-format off
// warpgroups 0, 1   one row each: S = Q K^T for every block of 64 keys, Q in registers; then the
//                   lse, or a term of S and its sum over heads. They take turns: while one
//                   multiplies, the other sums.
// warpgroup 2       one thread has TMA copy Q and the keys, three blocks ahead, some channels at a
//                   time
//
// barriers of a chunk  full  its channels have landed
//                      free  both rows have multiplied it
// clang-format on
//
// Shared memory: three stages of 64 keys, 216 KiB. Each loaded byte is used for 128 operations; the
// limit is the tensor cores. A row's bits do not depend on the row beside it.
#include <algorithm>
#include <cstdint>
#include <string>
#include <type_traits>
#include <utility>

#include "core/refusals.h"
#include "cuda/common/runtime.h"
#include "cuda/common/tensor_map.h"
#include "cuda/hopper/tensor_copy.cuh"
#include "cuda/index_loss/window_sums_sm90.h"
#include "cuda/index_loss/window_sums_sm90/consumer.cuh"

namespace winnow::cuda {
namespace {

using namespace window_sm90;

/// Has TMA copy a block of 64 rows into the next stage; copy_tile(tile, shared, full) copies one of
/// its tiles.
template <class Shape, class CopyTile>
__device__ void produce_block(KeyRing<Shape>& ring, PipelineState& state,
                              const CopyTile& copy_tile) {
  for (int chunk = 0; chunk < Shape::kChunks; ++chunk) {
    Barrier& full = ring.full[state.stage][chunk];
    ring.free[state.stage][chunk].wait(state.phase - 1);
    full.arrive_and_expect(Shape::kChunkTiles * kTileBytes);
    for (int i = 0; i < Shape::kChunkTiles; ++i) {
      const int tile = chunk * Shape::kChunkTiles + i;
      copy_tile(tile, ring.stages[state.stage] + tile * kTileBytes, full);
    }
  }
  state.next();
}

/// One thread; of every pair of rows first Q of both, then the keys of their windows.
template <class Shape>
__device__ void produce(const CUtensorMap& q, const CUtensorMap& k, const Parameters& params,
                        KeyRing<Shape>& ring) {
  PipelineState state;
  for (int item = static_cast<int>(blockIdx.x); item < params.items;
       item += static_cast<int>(gridDim.x)) {
    for (int i = 0; i < kPair; ++i) {
      const int t = WindowPair::first_row(params, item) + i;
      produce_block(ring, state, [&](int tile, std::byte* to, Barrier& full) {
        copy_box(to, q, full, tile * kTileColumns, params.first_head, t);
      });
    }
    WindowPair(params, item).for_each_block([&](int key) {
      const int row = static_cast<int>(params.slots.key_offset) + key;
      produce_block(ring, state, [&](int tile, std::byte* to, Barrier& full) {
        copy_box(to, k, full, tile * kTileColumns, row);
      });
    });
  }
}

template <class T, class Shape, class Row>
__global__ void __launch_bounds__(kThreads, 1)
    window_sums_kernel(const __grid_constant__ CUtensorMap q, const __grid_constant__ CUtensorMap k,
                       const __grid_constant__ Parameters params) {
  extern __shared__ __align__(1024) std::byte memory[];
  auto& shared = *reinterpret_cast<SharedStorage<Shape>*>(memory);
  if (threadIdx.x == 0) {
    prefetch(q);
    prefetch(k);
    shared.ring.init(1, false);
  }
  __syncthreads();
  if (threadIdx.x < Shape::kConsumerThreads) {
    grow_registers<kConsumerRegisters>();
    consume<T, Shape, Row>(params, shared);
  } else {
    shrink_registers<kProducerRegisters>();
    if (threadIdx.x == Shape::kConsumerThreads) produce(q, k, params, shared.ring);
  }
}

/// The operands of all passes: heads q [tokens, heads, dim] and keys k [keys, dim].
struct Operands {
  Tensor q;
  Tensor k;
  SlotLists slots;
};

template <class T, int kTiles, class Row>
void launch_passes(const Operands& operands, const Parameters& all, cudaStream_t stream) {
  using S = Shape<kTiles, kPair>;
  static_assert(sizeof(SharedStorage<S>) <= 227 * 1024);
  const CUtensorMap q = make_tensor_map(operands.q, {1, kGroupHeads, kTileColumns});
  const CUtensorMap k = make_tensor_map(operands.k, {kBlock, kTileColumns});
  const auto heads = static_cast<std::int32_t>(operands.q.shape[1]);
  for (std::int32_t first = 0; first < heads; first += kGroupHeads) {
    Parameters params = all;
    params.slots = operands.slots;
    params.tokens = static_cast<std::int32_t>(operands.q.shape[0]);
    params.items = (params.tokens + kPair - 1) / kPair;
    params.first_head = first;
    params.heads.count = std::min(heads - first, kGroupHeads);
    params.adds = all.adds || first > 0;
    for (const float** each : {&params.heads.lse, &params.heads.sink, &params.weights}) {
      if (*each != nullptr) *each += first;
    }
    if (params.lse != nullptr) params.lse += first;
    launch(window_sums_kernel<T, S, Row>,
           {.blocks = std::min(params.items, device_properties(operands.q.device).multiprocessors),
            .threads = kThreads,
            .shared_bytes = sizeof(SharedStorage<S>),
            .stream = stream},
           q, k, params);
  }
}

template <class Row, int... kTiles>
void launch_for(const Operands& operands, const Parameters& params, cudaStream_t stream) {
  if (operands.q.shape[0] == 0) return;
  const auto launch_width = [&]<int kWidth>(std::integral_constant<int, kWidth>) {
    if (operands.q.shape[2] != kWidth * kTileColumns) return;
    (operands.q.dtype == DType::bf16
         ? launch_passes<__nv_bfloat16, kWidth, Row>
         : launch_passes<__half, kWidth, Row>)(operands, params, stream);
  };
  (launch_width(std::integral_constant<int, kTiles>{}), ...);
}

constexpr int kIndexTiles = 2;

}  // namespace

std::string why_not_windows_sm90(const Tensor& q, const Tensor& kv, const Tensor& index_q,
                                 const Tensor& index_k) {
  if (std::string reason = needs_sm90_and_16_bits(q); !reason.empty()) return reason;
  if (q.shape[2] != 9 * kTileColumns && q.shape[2] != 8 * kTileColumns)
    return sentence(refusal::takes_qk_dims, "576 and 512");
  if (index_q.shape[2] != kIndexTiles * kTileColumns)
    return sentence(refusal::takes_dim, "index_dim", kIndexTiles * kTileColumns);
  for (const auto& [name, tensor] :
       {std::pair{"q", &q}, std::pair{"kv", &kv}, std::pair{"index_q", &index_q},
        std::pair{"index_k", &index_k}}) {
    if (tensor->shape[0] == 0) return sentence(refusal::takes_some_rows, name);
    if (!can_have_tensor_map(*tensor)) return sentence(refusal::takes_dense_rows, name);
  }
  return {};
}

void sum_window_probabilities_sm90(const AttentionTarget& call, cudaStream_t stream) {
  launch_for<TargetOfRow, 9, 8>({.q = call.q, .k = call.kv, .slots = call.slots},
                                {.heads = {.lse = data_of<const float>(call.lse),
                                           .sink = data_of<const float>(call.sink),
                                           .lse_stride = call.lse.stride[0]},
                                 .sums = call.target.data,
                                 .sums_stride = call.target.stride,
                                 .scale = call.scale,
                                 .adds = call.accumulate},
                                stream);
}

void compute_window_lse_sm90(const AttentionTarget& call, cudaStream_t stream) {
  launch_for<LseOfRow, 9, 8>({.q = call.q, .k = call.kv, .slots = call.slots},
                             {.heads = {.lse_stride = call.lse.stride[0]},
                              .lse = data_of<float>(call.lse),
                              .scale = call.scale},
                             stream);
}

void sum_window_scores_sm90(const IndexScores& call, cudaStream_t stream) {
  launch_for<ScoresOfRow, kIndexTiles>({.q = call.q, .k = call.k, .slots = call.slots},
                                       {.weights = data_of<const float>(call.weights),
                                        .sums = call.scores.data,
                                        .weights_stride = call.weights.stride[0],
                                        .sums_stride = call.scores.stride},
                                       stream);
}

}  // namespace winnow::cuda
