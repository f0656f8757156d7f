// SPDX-License-Identifier: Apache-2.0
// A math warpgroup: S of its block of every pair, the softmax, and its half of the columns of out.
#pragma once

#include <cstdint>

#include "cuda/hopper/from_lane_0.cuh"
#include "cuda/hopper/tensor_copy.cuh"
#include "cuda/sparse_attention/forward_sm90/shared.cuh"
#include "cuda/sparse_attention/forward_sm90/softmax.cuh"
#include "cuda/sparse_attention/forward_sm90/store.cuh"
#include "cuda/sparse_attention/large_logits.cuh"

namespace winnow::cuda::sparse_attention::forward_sm90 {

/// Issues the loads of an item's Q; heads past the last become zeros.
template <int kTiles>
__device__ inline void load_query(const ForwardParameters& params, const CUtensorMap& q,
                                  SharedStorage& shared, int item) {
  if (item >= params.items) return;
  shared.q_full.arrive_and_expect(kTiles * kTileBytes);
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    copy_box(shared.q + tile * kTileBytes, q, shared.q_full, tile * kTileColumns,
             item % params.head_groups * kHeads, item / params.head_groups);
  }
}

template <int kTiles>
__device__ inline void prefetch_query(const ForwardParameters& params, const CUtensorMap& q,
                                      int item) {
  if (item >= params.items) return;
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    prefetch_box(q, tile * kTileColumns, item % params.head_groups * kHeads,
                 item / params.head_groups);
  }
}

/// Warpgroup kSide, 0 or 1. Blocks are numbered in the order of the slots, 0 and 1 of a pair; both
/// warpgroups add the products of all blocks in that order.
template <class T, int kTiles, int kSide>
class Attention {
 public:
  __device__ Attention(const ForwardParameters& params, const CUtensorMap& q, SharedStorage& shared)
      : params_(params),
        q_(q),
        shared_(shared),
        scale_{params.power, params.rest_log2, params.scale_log2} {}

  __device__ void run() {
    if constexpr (kSide == 0) {
      run_first();
    } else {
      run_second();
    }
  }

 private:
  static constexpr int kOther = 1 - kSide;
  static constexpr float kRivalDistance = 0x1p-18f;  // of the products themselves
  static constexpr int kFirstColumn = kSide * kHalfTiles * kTileColumns;  // of out

  __device__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }
  __device__ static int row() {  // and 8 more
    return static_cast<int>(threadIdx.x) % kWarpgroup / 32 * 16 + lane() / 4;
  }
  __device__ static void sync_warpgroup() { sync_warps<1 + kSide, kWarpgroup>(); }

  __device__ void run_first() {
    start_item();
    int item = 0;   // of the previous pair
    int items = 0;  // that have been started
    BlockInfo info = read_info(0);
    for (int pair = 0;; ++pair) {
      if (info.has(kFirst | kEnd)) {
        if (pair > 0) end_item_first(pair - 1, item);
        if (info.has(kEnd)) return;
        shared_.q_full.wait(items++);
        multiply_keys<0, kParts>(pair);
        wgmma_wait<0>();
      } else {
        multiply_keys_and_other_values(pair, pair - 1);
      }
      item = info.item;
      if ((info.valid[0] & info.valid[1]) != 0xffffffffu) mask(s_, info);
      attend_own_block(info.has(kFirst), false);
      info = read_info(pair + 1);
      free_slices<1, 0>();
    }
  }

  __device__ void run_second() {
    const int step = static_cast<int>(gridDim.x);
    const bool is_loader = threadIdx.x % kWarpgroup == 0;
    if (is_loader) load_query<kTiles>(params_, q_, shared_, static_cast<int>(blockIdx.x));
    start_item();
    int items = 0;
    BlockInfo info = read_info(0);
    for (int pair = 0;; ++pair) {
      if (info.has(kEnd)) return;
      if (info.has(kFirst)) {
        if (is_loader) prefetch_query<kTiles>(params_, q_, info.item + step);
        shared_.q_full.wait(items++);
      }
      BlockInfo next;
      if (info.has(kEmpty)) {
        for (Barrier& full : shared_.full[kSide]) full.wait(pair);
        follow_maximum(pair);
        multiply_other_values();
        free_slices<0, 0>();
        sync_warpgroup();  // all warps know that warpgroup 0 is done with Q
        if (is_loader) load_query<kTiles>(params_, q_, shared_, info.item + step);
        publish_totals();
        hand_over_maxima();
        free_part();
        next = read_info(pair + 1);
      } else {
        multiply_keys_and_other_values(pair, pair);
        if (info.has(kLast)) {
          sync_warpgroup();  // all warps' products have read Q
          if (is_loader) load_query<kTiles>(params_, q_, shared_, info.item + step);
        }
        if ((info.valid[0] & info.valid[1]) != 0xffffffffu) mask(s_, info);
        attend_own_block(false, info.has(kLast));
        next = read_info(pair + 1);
        free_slices<1, 0>();
      }
      if (info.has(kLast)) {
        shared_.finished.wait(items - 1);
        const float normalizers[2] = {shared_.normalizers[row()], shared_.normalizers[row() + 8]};
        store_out<T>(params_, out_, normalizers, info.item, kFirstColumn);
        attend_marked_rows(info.item, normalizers);
        start_item();
      }
      info = next;
    }
  }

  __device__ void start_item() {
    state_[0] = RowState{};
    state_[1] = RowState{};
#pragma unroll
    for (int i = 0; i < 128; ++i) out_[i] = 0;
  }

  __device__ BlockInfo read_info(int pair) {
    shared_.info_full[kSide][pair % 2].wait(pair / 2);
    const BlockInfo& info = shared_.info[kSide][pair % 2];
    return {{from_lane_0(lane(), info.valid[0]), from_lane_0(lane(), info.valid[1])},
            from_lane_0(lane(), info.item),
            from_lane_0(lane(), info.flags)};
  }

  __device__ static constexpr int tile_at(int i) { return tile_of<kSide>(i); }

  /// Issues the products of Q with the parts kBegin to kEnd - 1 of this warpgroup's block, each
  /// once it has landed.
  template <int kBegin, int kEnd>
  __device__ void multiply_keys(int pair) {
    const std::uint64_t q = k_major(shared_address(shared_.q));
    const std::uint64_t keys = k_major(shared_address(shared_.blocks[kSide]));
#pragma unroll
    for (int part = kBegin; part < kEnd; ++part) {
      shared_.full[kSide][part].wait(pair);
      fence_proxy_async();
      wgmma_fence();
#pragma unroll
      for (int i = first_tile(part); i < min(first_tile(part + 1), kTiles); ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const std::uint64_t offset = tile_at(i) * (kTileBytes >> 4) + j * kNextKMajor;
          multiply_64x64x16<T, 0, 0>(s_, q + offset, keys + offset, i > 0 || j > 0);
        }
      }
    }
    wgmma_commit();
  }

  /// S of this warpgroup's block; amid it the values of the block before, which is the other
  /// warpgroup's.
  __device__ void multiply_keys_and_other_values(int pair, int pair_of_other) {
    multiply_keys<0, 2>(pair);
    follow_maximum(pair_of_other);
    multiply_other_values();
    multiply_keys<2, 3>(pair);
    free_slices<0, 1>();
    wgmma_wait<0>();
  }

  /// Waits for P of the other warpgroup's block and rescales out to its running maximum.
  __device__ void follow_maximum(int pair) {
    shared_.ready[kOther].wait(pair);
    Rescale rescale;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float maximum = shared_.maxima[kOther][row() + 8 * half];
      if (maximum != state_[half].maximum) {
        rescale.factors[half] = fast_exp2(-scale_.rise(state_[half].maximum, maximum));
        state_[half].sum *= rescale.factors[half];
        state_[half].maximum = maximum;
      }
    }
    if (rescale.is_needed()) rescale.apply(out_);
  }

  /// Issues out += P V of the other warpgroup's block, a group of products a slice.
  __device__ void multiply_other_values() {
    wgmma_fence();
    const std::uint32_t block = shared_address(shared_.blocks[kOther]);
    const std::uint64_t p = k_major(block + kValueTiles * kTileBytes);
    const std::uint64_t values = mn_major(block + kSide * kHalfTiles * kTileBytes, kTileBytes);
#pragma unroll
    for (int i = 0; i < kSlices; ++i) {
      multiply_64x256x16<T, 0, 1>(out_, p + i * kNextKMajor, values + i * kNextMnMajor, 1);
      wgmma_commit();
    }
  }

  /// Frees the slices of a part as their products end, kNewer groups of products having been issued
  /// since. kOwn: the part of the own block, otherwise that of the other warpgroup's.
  template <int kOwn, int kNewer>
  __device__ void free_slices() {
    free_slice<kOwn, 0, kNewer + 3>();
    free_slice<kOwn, 1, kNewer + 2>();
    free_slice<kOwn, 2, kNewer + 1>();
    free_slice<kOwn, 3, kNewer>();
  }
  template <int kOwn, int kSlice, int kPending>
  __device__ void free_slice() {
    wgmma_wait<kPending>();
    if (lane() == 0) shared_.free[kOwn ? kSide : kOther][kOwn ? 0 : 1][kSlice].arrive();
  }
  /// Frees the part of the own block of which there is none.
  __device__ void free_part() {
    if (lane() != 0) return;
    for (Barrier& free : shared_.free[kSide][0]) free.arrive();
  }

  /// The softmax of the own block. Gives P to the other warpgroup first, which waits for it, and
  /// then issues out += P V, a group of products a slice.
  __device__ void attend_own_block(bool is_first, bool is_last) {
    const std::uint32_t block = shared_address(shared_.blocks[kSide]);
    const std::uint64_t values = mn_major(block + kSide * kHalfTiles * kTileBytes, kTileBytes);
    // All warps' products have read the rope tile, which P overwrites.
    if constexpr (kTiles == kMaxTiles) sync_warpgroup();
    const Rescale rescale = make_probabilities(is_first);
    fence_proxy_async();
    if (kSide == 1 && is_last) publish_totals();
    hand_over_maxima();
    if (rescale.is_needed()) rescale.apply(out_);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kSlices; ++i) {
      multiply_64x256x16<T, 1>(out_, p_[i], values + i * kNextMnMajor, 1);
      wgmma_commit();
    }
  }

  /// Makes P from the running maximum at once, where there is one; if that has to move, once more.
  /// Nearly always no lane has to know another's scores, which would cost shuffles on the critical
  /// path.
  __device__ Rescale make_probabilities(bool is_first) {
    const float subtrahends[2] = {subtrahend_of(state_[0], scale_),
                                  subtrahend_of(state_[1], scale_)};
    float sums[2] = {};
    bool is_done = false;
    if (!is_first) {
      exponentiate_block(subtrahends, sums);
      bool can_stay = true;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        can_stay = can_stay && is_plain(state_[half], subtrahends[half]) && !(sums[half] > kMaxSum);
      }
      is_done = __all_sync(0xffffffffu, can_stay);
    }
    Rescale rescale;
    if (!is_done) {
      const MaximumMoves moves = move_maxima(s_, state_, sums, scale_, subtrahends);
      rescale = moves.rescale;
      sums[0] = sums[1] = 0;
      exponentiate_block(moves.subtrahends, sums);
    } else if (params_.max_logits != nullptr) {
      state_[0].largest = fmaxf(state_[0].largest, largest_product(s_, 0));
      state_[1].largest = fmaxf(state_[1].largest, largest_product(s_, 1));
    }
    state_[0].sum += sums[0];
    state_[1].sum += sums[1];
    return rescale;
  }
  __device__ void exponentiate_block(const float (&subtrahends)[2], float (&sums)[2]) {
    const std::uint32_t tile = shared_address(shared_.blocks[kSide]) + kValueTiles * kTileBytes;
#pragma unroll
    for (int i = 0; i < kSlices; ++i) {
      exponentiate<T>(s_, i, subtrahends, scale_, sums, p_[i]);
      store_probabilities(p_[i], i, tile);
    }
  }
  __device__ void hand_over_maxima() {
    if (lane() % 4 == 0) {
      shared_.maxima[kSide][row()] = state_[0].maximum;
      shared_.maxima[kSide][row() + 8] = state_[1].maximum;
    }
    shared_.ready[kSide].arrive();
  }

  /// Leaves the sums of warpgroup 1 to warpgroup 0, which makes the results of an item.
  __device__ void publish_totals() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = quad_sum(state_[half].sum);
      const float largest = quad_max(state_[half].largest);
      if (lane() % 4 != 0) continue;
      shared_.sums[row() + 8 * half] = sum;
      shared_.largest[row() + 8 * half] = largest;
    }
  }

  /// The end of an item in warpgroup 0: the values of its last block, the results of its rows, out.
  __device__ void end_item_first(int pair, int item) {
    follow_maximum(pair);
    Normalizers normalizers;
    if (from_lane_0(lane(), shared_.info[kOther][pair % 2].flags) & kEmpty) {
      normalizers = finish_rows(item);
      if (lane() == 0) {
        for (Barrier& free : shared_.free[kOther][1]) free.arrive();
      }
    } else {
      multiply_other_values();
      normalizers = finish_rows(item);
      free_slices<0, 0>();
    }
    store_out<T>(params_, out_, normalizers.of_row, item, kFirstColumn);
    attend_marked_rows(item, normalizers.of_row);
    start_item();
  }

  /// Attends the rows of this warp once more whose normalizers are marked.
  __device__ void attend_marked_rows(int item, const float (&normalizers)[2]) const {
    // Four neighbouring bits stand for a row, as four lanes do.
    const std::uint64_t rows = __ballot_sync(0xffffffffu, is_marked(normalizers[0])) |
                               std::uint64_t{__ballot_sync(0xffffffffu, is_marked(normalizers[1]))}
                                   << 32;
    if (rows == 0) return;
    const int first_head = item % params_.head_groups * kHeads + row() - lane() / 4;
#pragma unroll 1
    for (int i = 0; i < 16; ++i) {
      if (!((rows >> (4 * i)) & 1)) continue;
      attend_in_double<T>(params_, item / params_.head_groups, first_head + i, kFirstColumn,
                          kFirstColumn + kHalfTiles * kTileColumns);
    }
  }

  struct Normalizers {
    float of_row[2];
  };
  /// Writes lse and max_logits, and tells warpgroup 1 by what to multiply out.
  __device__ Normalizers finish_rows(int item) {
    Normalizers normalizers;
    const int t = item / params_.head_groups;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = row() + 8 * half;
      const int head = item % params_.head_groups * kHeads + r;
      const bool is_there = head < params_.heads;
      const auto logit = [&](float product) { return product * params_.power * params_.rest; };
      const float sink =
          is_there && params_.sink != nullptr ? __ldg(params_.sink + head) : -INFINITY;
      const float maximum = logit(state_[half].maximum);
      const RowEnd end = finish_row(maximum, quad_sum(state_[half].sum) + shared_.sums[r], sink);
      const float own_largest = quad_max(state_[half].largest);
      const float largest = fmaxf(own_largest, shared_.largest[r]);
      const float share = end.normalizer * fast_exp2(scale_.rise(state_[half].maximum, largest));
      // The warpgroups add channels in different orders: products that tie differ in the last bits,
      // which may be worth more than an exponential bears.
      const bool has_rival =
          fabsf(own_largest - shared_.largest[r]) <= kRivalDistance * fabsf(largest);
      normalizers.of_row[half] = is_shared_at_large_logits(maximum, share, has_rival)
                                     ? marked(end.normalizer)
                                     : end.normalizer;
      if (lane() % 4 != 0) continue;
      shared_.normalizers[r] = normalizers.of_row[half];
      if (!is_there) continue;
      params_.lse[t * params_.lse_stride + head] = end.lse;
      if (params_.max_logits != nullptr) {
        params_.max_logits[t * params_.max_logits_stride + head] = logit(largest);
      }
    }
    shared_.finished.arrive();
    return normalizers;
  }

  const ForwardParameters& params_;
  const CUtensorMap& q_;
  SharedStorage& shared_;
  ExponentScale scale_;
  RowState state_[2];  // sums are over this lane's columns of this warpgroup's blocks
  Scores s_;
  Probabilities p_;
  float out_[128];
};

}  // namespace winnow::cuda::sparse_attention::forward_sm90
