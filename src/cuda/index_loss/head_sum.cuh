// SPDX-License-Identifier: Apache-2.0
// For every slot of every query row the sum over heads of a term of q . k: with the probabilities
// of attention it is the indexer's target, with weighted positive parts the indexer's score.
//
// A block has one query row. Each lane sums its heads, then the four lanes and the warps that share
// a key are summed, always in the same order.
#pragma once

#include <cstdint>

#include "cuda/common/head_products.cuh"
#include "cuda/common/runtime.h"

namespace winnow::cuda {

/// Where the sums go.
struct HeadSums {
  float* data;  // [tokens, slots]; 0 for a slot without a key
  std::int64_t stride;
  bool fills_rows;  // whether slots past the last that may hold a key are written too
};

template <class T, int kHeads>
struct HeadSumStorage {
  typename HeadTile<T, kHeads>::Stage stages[kHeadStages];
  float constants[kHeads];
  float partial[HeadTile<T, kHeads>::kHeadWarps][kTileKeys];
};

/// Term gives a constant of a head by of_head(t, h), and the term by operator()(product, constant).
template <class T, int kHeads, class Term>
__global__ void __launch_bounds__(kHeadThreads, 3)
    sum_heads_kernel(const __grid_constant__ HeadOperands operands,
                     const __grid_constant__ HeadSums sums, const __grid_constant__ Term term,
                     bool adds) {
  using Tile = HeadTile<T, kHeads>;
  extern __shared__ __align__(16) unsigned char memory[];
  auto& shared = *reinterpret_cast<HeadSumStorage<T, kHeads>*>(memory);
  const int thread = static_cast<int>(threadIdx.x);
  constexpr unsigned kAllLanes = 0xffffffffu;

  for (std::int64_t item = blockIdx.x; item < operands.tokens; item += gridDim.x) {
    const std::int64_t t = operands.tokens - 1 - item;  // the longest windows are often the last
    const RowSlots slots = operands.slots.row(t);
    float* const row = sums.data + t * sums.stride;
    if (thread < kHeads) {  // the first step's barrier makes it visible to all
      shared.constants[thread] = thread < operands.heads ? term.of_head(t, thread) : 0;
    }
    HeadProducts<T, kHeads> tiles(operands, slots, t, shared.stages);
    for (int tile = 0; tile < tiles.tiles(); ++tile) {
      typename Tile::Accumulator products;
      const auto& stage = tiles.multiply(products);
#pragma unroll
      for (int i = 0; i < Tile::kKeyBlocks; ++i) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          float sum = 0;
#pragma unroll
          for (int n = 0; n < Tile::kHeadBlocks; ++n) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              const int h = Tile::head(n, e);
              if (h < operands.heads) sum += term(products[i][n][r * 2 + e], shared.constants[h]);
            }
          }
          sum += __shfl_xor_sync(kAllLanes, sum, 1);
          sum += __shfl_xor_sync(kAllLanes, sum, 2);
          if (Tile::lane() % 4 == 0) {
            shared.partial[Tile::head_warp()][Tile::key(i, r * 2)] = sum;
          }
        }
      }
      __syncthreads();  // the partial sums are there; they are read before the next step's barrier
      const std::int64_t slot = std::int64_t{tile} * kTileKeys + thread;
      if (thread < kTileKeys && slot < slots.count) {
        float sum = 0;
        if (stage.key[thread] >= 0) {
#pragma unroll
          for (int warp = 0; warp < Tile::kHeadWarps; ++warp) sum += shared.partial[warp][thread];
        }
        row[slot] = adds ? row[slot] + sum : sum;
      }
    }
    if (sums.fills_rows && !adds) {
      for (std::int64_t slot = std::int64_t{slots.count} + thread; slot < operands.slots.slots;
           slot += kHeadThreads) {
        row[slot] = 0;
      }
    }
    __syncthreads();  // the next row's constants and stages overwrite this one's
  }
}

/// Launches a pass over some heads of every row; `adds`: it adds to the sums of earlier passes.
template <class T, int kHeads, class Term>
void sum_heads(const HeadOperands& operands, const HeadSums& sums, const Term& term, bool adds,
               cudaStream_t stream) {
  launch(sum_heads_kernel<T, kHeads, Term>,
         {.blocks = std::min(operands.tokens, kMaxBlocks),
          .threads = kHeadThreads,
          .shared_bytes = sizeof(HeadSumStorage<T, kHeads>),
          .stream = stream},
         operands, sums, term, adds);
}

}  // namespace winnow::cuda
