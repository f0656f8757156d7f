// SPDX-License-Identifier: Apache-2.0
// The warpgroups of the pass that bounds what every slot adds to its key (exact_sums_sm90.cu).
#pragma once

#include <cstdint>

#include "cuda/common/mma.cuh"
#include "cuda/hopper/gather.cuh"
#include "cuda/hopper/pipeline.cuh"
#include "cuda/hopper/turns.cuh"
#include "cuda/sparse_attention/backward_sm90/block_scores.cuh"
#include "cuda/sparse_attention/backward_sm90/shared.cuh"

namespace winnow::cuda::sparse_attention::backward_sm90 {

/// Bounds are computed in this part of the terms', so that they do not overflow before these do.
inline constexpr float kSizeUnit = 0x1p-10f;

// The bound of a key is a sum of integers, which is the same in every order. A float from 2^-124 on
// is a multiple of the unit of its bin, which has 16 octaves; smaller ones are rounded up.
inline constexpr int kBoundBins = 16;
inline constexpr int kBinOctaves = 16;
inline constexpr int kLeastBound = -124;  // log2
inline constexpr int kBinBits = 4;        // of precision of the least bounds of a bin

/// log2 of the unit of a bin.
__host__ __device__ constexpr int bin_unit(int bin) {
  return kLeastBound + bin * kBinOctaves - kBinBits;
}

/// Adds a bound to the bins of a key.
__device__ inline void add_bound(unsigned long long* bins, float bound) {
  constexpr float kLeast = 0x1p-124f;
  if (bound == 0) return;
  int bin = kBoundBins - 1;
  unsigned long long units = 1ull << 28;  // not finite: more than exact sums can have
  if (bound < INFINITY) {
    const int bits = __float_as_int(fmaxf(bound, kLeast));
    const int octave = (bits >> 23) - 127 - kLeastBound;
    bin = octave / kBinOctaves;
    const int significand = (bits & 0x7fffff) | 0x800000;
    units = (significand >> (23 - kBinBits - octave % kBinOctaves)) + 1;
  }
  atomicAdd(bins + bin, units);
}

template <class T>
struct BoundParameters {
  BackwardSm90Parameters<T> call;
  const T* q;  // [tokens, heads, qk_dim]
  std::int64_t q_token_stride, q_head_stride;
  const float2* sizes;         // [items, 64]: largest elements of q and d_out, in kSizeUnit
  unsigned long long* bounds;  // [keys, kBoundBins], in parts of kSizeUnit
};

inline constexpr int kBoundStages = 3;
inline constexpr int kProducerRegisters = 64;
inline constexpr int kProbabilityRegisters = 224;
inline constexpr int kBoundRegisters = 216;
// A block starts with 168 a thread.
static_assert(kProducerRegisters + kProbabilityRegisters + kBoundRegisters <= 3 * 168);

template <int kTiles>
struct BoundStorage {
  std::byte stages[kBoundStages][kTiles][kTileBytes];  // Q, then d_out, then the keys of an item
  uint4 exponentials[4][kWarpgroup];  // exp(s - lse) of a block, as the lanes hold them
  float p_sums[4][kBlock];            // of a warp's heads
  float ds_sums[4][kBlock];           // likewise
  Barrier full[kBoundStages];         // the rows of a stage have landed
  Barrier free[kBoundStages];         // they are no longer in use
  Barrier exponentials_full;          // exponentials and p_sums are written
  Barrier exponentials_free;          // these and ds_sums are no longer in use

  __device__ void init() {
    for (int stage = 0; stage < kBoundStages; ++stage) {
      full[stage].init(kWarpgroup);  // each producer arrives for its copies
      free[stage].init(2 * kWarpgroup);
    }
    exponentials_full.init(kWarpgroup);
    exponentials_free.init(kWarpgroup);
    fence_barrier_init();
  }
};
static_assert(sizeof(BoundStorage<kMaxTiles>) <= 227 * 1024);

/// The key in a slot of an item; -1: none.
template <class T>
__device__ std::int32_t key_of(const BackwardSm90Parameters<T>& call, const Item& item, int slot) {
  if (slot >= item.slots) return -1;
  const std::int32_t key = __ldg(call.indices + item.t * call.indices_stride + slot);
  return key < call.keys ? key : -1;
}

/// Warpgroup 0: gathers Q and d_out of an item, then its keys.
template <class T, int kTiles>
class BoundProducer {
 public:
  __device__ BoundProducer(const BoundParameters<T>& params, BoundStorage<kTiles>& shared)
      : params_(params), shared_(shared) {}

  __device__ void run() {
    const BackwardSm90Parameters<T>& call = params_.call;
    for (int number = static_cast<int>(blockIdx.x); number < call.items;
         number += static_cast<int>(gridDim.x)) {
      const Item item = item_of(call, number);
      std::int32_t next = own_key(item, 0);
      const int heads = call.heads - item.first_head;
      const int own_head = row_of(lane() % kRows);
      const int head = own_head < heads ? own_head : -1;
      copy<kTiles>(
          params_.q + item.t * params_.q_token_stride + item.first_head * params_.q_head_stride,
          params_.q_head_stride, head);
      copy<kValueTiles>(
          call.d_out + item.t * call.d_out_token_stride + item.first_head * call.d_out_head_stride,
          call.d_out_head_stride, head);
      for (int block = 0; block < item.blocks; ++block) {
        const std::int32_t key = next;
        next = own_key(item, block + 1);  // arrives during the copies
        copy<kTiles>(call.kv, call.kv_stride, key);
      }
    }
  }

 private:
  static constexpr int kGroups = kWarpgroup / 8;  // eight lanes copy a row
  static constexpr int kRows = kBlock / kGroups;  // of a thread
  __device__ static int lane() { return static_cast<int>(threadIdx.x % 8); }
  __device__ static int row_of(int i) { return static_cast<int>(threadIdx.x / 8) + i * kGroups; }

  /// The key of row_of(i) for lane i of eight, i < kRows.
  __device__ std::int32_t own_key(const Item& item, int block) const {
    return key_of(params_.call, item, block * kBlock + row_of(lane() % kRows));
  }

  /// Copies rows of a tensor into the next stage; `row` is that of row_of(i) for lane i of eight,
  /// negative: zeros.
  template <int kCopied>
  __device__ void copy(const T* tensor, std::int64_t stride, std::int32_t row) {
    shared_.free[state_.stage].wait(state_.phase - 1);
    const std::uint32_t stage = shared_address(shared_.stages[state_.stage]);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const std::int32_t from_row = __shfl_sync(0xffffffffu, row, i, 8);
      const T* const from = tensor + (from_row < 0 ? 0 : from_row) * stride + lane() * 8;
      const std::uint32_t to = stage + tile_offset(row_of(i), lane());
#pragma unroll
      for (int tile = 0; tile < kCopied; ++tile) {
        copy_16_bytes(to + tile * kTileBytes, from + tile * kTileColumns, from_row >= 0);
      }
    }
    shared_.full[state_.stage].arrive_after_copies();
    state_.next();
  }

  const BoundParameters<T>& params_;
  BoundStorage<kTiles>& shared_;
  PipelineState<kBoundStages> state_;
};

/// A consumer's way through the stages. kTiles tiles of one operand stay in registers.
template <class T, int kStageTiles, int kTiles>
class BoundOperand {
 public:
  __device__ explicit BoundOperand(BoundStorage<kStageTiles>& shared) : shared_(shared) {}

  /// Passes a stage by that the other consumer reads.
  __device__ void skip() {
    shared_.full[state_.stage].wait(state_.phase);
    release_for_warp();
  }

  /// Loads the operand from a stage.
  __device__ void load() {
    const int lane = static_cast<int>(threadIdx.x % 32);
    const BlockOffset offset = rows_first(lane);
    const int row = static_cast<int>(threadIdx.x % kWarpgroup / 32) * 16 + offset.row;
    shared_.full[state_.stage].wait(state_.phase);
#pragma unroll
    for (int i = 0; i < kTiles * 4; ++i) {
      load_fragments(rows_[i], shared_.stages[state_.stage][i / 4] +
                                   tile_offset(row, i % 4 * 2 + offset.column / 8));
    }
    wait_for_own_loads();                 // a precaution: here cp.async refills the stage
    shared_.free[state_.stage].arrive();  // each lane: racecheck does not follow one for its warp
    state_.next();
  }

  /// Computes the products of the operand and the next block of keys, whose stage is free then. The
  /// consumers take turns: otherwise both would multiply at the same time, and then none.
  __device__ void multiply(float (&products)[32], int side) {
    shared_.full[state_.stage].wait(state_.phase);
    fence_proxy_async();  // cp.async writes through the generic proxy
    const std::uint32_t stage = shared_address(shared_.stages[state_.stage]);
    acquire_tensor_cores(side);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kTiles * 4; ++i) {
      multiply_64x64x16<T, 0>(products, rows_[i],
                              k_major(stage + i / 4 * kTileBytes) + i % 4 * kNextKMajor, i > 0);
    }
    wgmma_commit();
    hand_over_tensor_cores(1 - side);
    wgmma_wait<0>();
    release_for_warp();
  }

 private:
  /// Frees a stage of which the lanes have read nothing themselves.
  __device__ void release_for_warp() {
    if (threadIdx.x % 32 == 0) shared_.free[state_.stage].arrive(32);
    state_.next();
  }

  BoundStorage<kStageTiles>& shared_;
  PipelineState<kBoundStages> state_;
  std::uint32_t rows_[kTiles * 4][4];  // per 16 channels
};

/// Of 2 kHalf sums a lane sends one half to the lane 2 kHalf away, which keeps them, and adds what
/// it gets to the other half.
template <int kHalf>
__device__ void fold(float (&sums)[16]) {
  const bool is_high = threadIdx.x & (2 * kHalf);
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    const float sent = is_high ? sums[i] : sums[i + kHalf];
    const float kept = is_high ? sums[i + kHalf] : sums[i];
    sums[i] = kept + __shfl_xor_sync(0xffffffffu, sent, 2 * kHalf);
  }
}

/// Sums |words| times the sizes of the lane's two heads over the heads of the calling warp. Lane l
/// gets the sums of keys 2 l and 2 l + 1.
template <class T>
__device__ float2 weighted_sums(const std::uint32_t (&words)[16], float size, float size_of_next) {
  float sums[16];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float2 first = unpack_pair<T>(words[2 * i]);
    const float2 second = unpack_pair<T>(words[2 * i + 1]);
    sums[2 * i] = fmaf(fabsf(first.x), size, fabsf(second.x) * size_of_next);
    sums[2 * i + 1] = fmaf(fabsf(first.y), size, fabsf(second.y) * size_of_next);
  }
  fold<8>(sums);
  fold<4>(sums);
  fold<2>(sums);
  return {sums[0], sums[1]};
}

/// Warpgroup 1: S = Q K^T, with Q in registers, and the part of P in the bounds.
template <class T, int kTiles>
__device__ void bound_probabilities(const BoundParameters<T>& params,
                                    BoundStorage<kTiles>& shared) {
  const int thread = static_cast<int>(threadIdx.x % kWarpgroup);
  const int lane = thread % 32;
  const int row = thread / 32 * 16 + lane / 4;  // and + 8: heads
  BoundOperand<T, kTiles, kTiles> q(shared);
  int blocks = 0;  // of all items
  for (int number = static_cast<int>(blockIdx.x); number < params.call.items;
       number += static_cast<int>(gridDim.x)) {
    const std::int64_t head = std::int64_t{number} * kHeads + row;
    const LaneHeads heads(params.call.constants + head);
    const float sizes[2] = {params.sizes[head].y, params.sizes[head + 8].y};
    q.load();
    q.skip();
    const int end = blocks + item_of(params.call, number).blocks;
    for (; blocks < end; ++blocks) {
      float s[32];
      q.multiply(s, 0);
      std::uint32_t p[16];
      std::uint32_t exponentials[16];
      // Columns without a key are computed too; nothing is added for them.
      constexpr std::uint32_t kAll[2] = {0xffffffffu, 0xffffffffu};
      probabilities<T>(s, kAll, heads, params.call.scale_log2, p, exponentials);
      shared.exponentials_free.wait(blocks - 1);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        shared.exponentials[i][thread] =
            make_uint4(exponentials[4 * i], exponentials[4 * i + 1], exponentials[4 * i + 2],
                       exponentials[4 * i + 3]);
      }
      *reinterpret_cast<float2*>(&shared.p_sums[thread / 32][2 * lane]) =
          weighted_sums<T>(p, sizes[0], sizes[1]);
      shared.exponentials_full.arrive();
    }
  }
  acquire_tensor_cores(0);  // the last hand-over has no other taker
}

/// Warpgroup 2: dP = d_out V^T, with d_out in registers, the part of dS, and the bounds.
template <class T, int kTiles>
__device__ void bound_gradients(const BoundParameters<T>& params, BoundStorage<kTiles>& shared) {
  const int thread = static_cast<int>(threadIdx.x % kWarpgroup);
  const int lane = thread % 32;
  const int row = thread / 32 * 16 + lane / 4;  // and + 8: heads
  BoundOperand<T, kTiles, kValueTiles> d_out(shared);
  hand_over_tensor_cores(0);
  int blocks = 0;  // of all items
  for (int number = static_cast<int>(blockIdx.x); number < params.call.items;
       number += static_cast<int>(gridDim.x)) {
    const std::int64_t head = std::int64_t{number} * kHeads + row;
    const LaneHeads heads(params.call.constants + head);
    const float sizes[2] = {params.sizes[head].x, params.sizes[head + 8].x};
    d_out.skip();
    d_out.load();
    const Item item = item_of(params.call, number);
    for (int block = 0; block < item.blocks; ++block, ++blocks) {
      const std::int32_t key = key_of(params.call, item, block * kBlock + thread % kBlock);
      float dp[32];
      d_out.multiply(dp, 1);
      shared.exponentials_full.wait(blocks);
      std::uint32_t ds[16];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint4 words = shared.exponentials[i][thread];
        ds[4 * i] = words.x;
        ds[4 * i + 1] = words.y;
        ds[4 * i + 2] = words.z;
        ds[4 * i + 3] = words.w;
      }
      score_gradients<T>(dp, heads, params.call.scale, ds);
      *reinterpret_cast<float2*>(&shared.ds_sums[thread / 32][2 * lane]) =
          weighted_sums<T>(ds, sizes[0], sizes[1]);
      sync_warps<3, kWarpgroup>();  // 1 and 2 are those of turns
      if (thread < kBlock && key >= 0) {
        float bound = 0;
#pragma unroll
        for (int warp = 0; warp < 4; ++warp) {
          bound += shared.p_sums[warp][thread] + shared.ds_sums[warp][thread];
        }
        // The rounding of these sums, and of the tensor cores', is far below 2^-10.
        add_bound(params.bounds + std::int64_t{key} * kBoundBins, bound * (1 + 0x1p-10f));
      }
      shared.exponentials_free.arrive();
    }
  }
}

}  // namespace winnow::cuda::sparse_attention::backward_sm90
