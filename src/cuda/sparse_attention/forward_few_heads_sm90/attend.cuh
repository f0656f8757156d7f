// SPDX-License-Identifier: Apache-2.0
// The math warpgroup of a team: S^T, its softmax, and out^T of the team's blocks; then the two
// teams' halves of an item are put together.
//
// A lane holds columns 2c, 2c + 1, 2c + 8 and 2c + 9 (c = lane % 4) of every accumulator: four
// heads.
#pragma once

#include <cstdint>

#include "cuda/common/mma.cuh"
#include "cuda/hopper/from_lane_0.cuh"
#include "cuda/hopper/store_matrices.cuh"
#include "cuda/sparse_attention/forward_few_heads_sm90/shared.cuh"
#include "cuda/sparse_attention/large_logits.cuh"

namespace winnow::cuda::sparse_attention::forward_few_heads {

template <class T, int kTiles, int kTeam>
class Attention {
 public:
  __device__ Attention(const ForwardParameters& params, SharedStorage& shared)
      : params_(params),
        shared_(shared),
        scale_{params.power, params.rest_log2, params.scale_log2} {}

  __device__ void run() {
    int item = static_cast<int>(blockIdx.x);
    int slots = slots_of(params_, item);
    for (int i = 0; item < params_.items; ++i) {
      const int next_item = item + static_cast<int>(gridDim.x);
      const int next_slots = slots_of(params_, next_item);
      start_item();
      shared_.q_full[i % 2].wait(i / 2);
      const int blocks = blocks_of(slots, kTeam);
      for (int block = 0; block < blocks; ++block) {
        multiply_keys(shared_address(shared_.q[i % 2]));
        apply_softmax();
        multiply_values();
      }
      finish_item(item, i);
      item = next_item;
      slots = next_slots;
    }
  }

 private:
  // The first of the tiles that this team finishes, and of those that the other one does.
  static constexpr int kOwn = kTeam * (kValueTiles / 2);
  static constexpr int kOthers = kValueTiles / 2 - kOwn;

  __device__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }
  __device__ static int warp() { return static_cast<int>(threadIdx.x) % kWarpgroup / 32; }
  /// The head of the j-th of the lane's four columns.
  __device__ static int head(int j) { return lane() % 4 * 2 + j % 2 + j / 2 * 8; }
  /// Which of a lane's four columns element i of an accumulator is.
  __device__ static constexpr int column(int i) { return i % 2 + i / 4 * 2; }

  /// Waits for the 128 threads of this warpgroup.
  __device__ static void sync_team() { sync_warps<1 + kTeam, kWarpgroup>(); }

  __device__ void start_item() {
#pragma unroll
    for (int j = 0; j < 4; ++j) state_[j] = RowState{};
#pragma unroll
    for (int tile = 0; tile < kValueTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 8; ++i) out_[tile][i] = 0;
    }
  }

  /// S^T = K Q^T, 64 keys by 16 heads.
  __device__ void multiply_keys(std::uint32_t q) {
    shared_.full[kTeam].wait(blocks_);
    ++blocks_;
    fence_proxy_async();
    wgmma_fence();
    const std::uint32_t stage = shared_address(shared_.stages[kTeam]);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        multiply_64x16x16<T, 0, 0>(s_, k_major(stage + tile * kTileBytes) + i * kNextKMajor,
                                   k_major(q + tile * kQueryTileBytes) + i * kNextKMajor,
                                   tile > 0 || i > 0);
      }
    }
    wgmma_commit();
    wgmma_wait<0>();
  }

  /// Turns S^T into P, which goes to shared memory as [heads, keys].
  __device__ void apply_softmax() {
    const std::uint32_t valid = from_lane_0(lane(), shared_.valid[kTeam][warp()]);
    if (valid != 0xffff) mask(valid);
    const MaximumMoves moves = move_maxima();
    if (__any_sync(0xffffffffu, moves.rescale[0] != 1 || moves.rescale[1] != 1 ||
                                    moves.rescale[2] != 1 || moves.rescale[3] != 1)) {
#pragma unroll
      for (int tile = 0; tile < kValueTiles; ++tile) {
#pragma unroll
        for (int i = 0; i < 8; ++i) out_[tile][i] *= moves.rescale[column(i)];
      }
    }
    std::uint32_t p[4];  // keys g and g + 8 of heads 0-7, then of heads 8-15
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      const int j = pair / 2 * 2;
      const float low = exponential(s_[2 * pair], moves.subtrahend[j], state_[j].maximum);
      const float high =
          exponential(s_[2 * pair + 1], moves.subtrahend[j + 1], state_[j + 1].maximum);
      state_[j].sum += low;
      state_[j + 1].sum += high;
      p[pair] = pack<T>(low, high);
    }
    // Matrix i holds 8 keys by 8 heads; stored transposed, a head's 8 keys are a 16-byte piece.
    const int matrix = lane() / 8;
    store_transposed(shared_address(shared_.p[kTeam]) +
                         tile_offset(lane() % 8 + matrix / 2 * 8, warp() * 2 + matrix % 2),
                     p);
    fence_proxy_async();
    sync_team();  // all of P is there
  }

  /// Sets the scores of slots without a key to -inf.
  __device__ void mask(std::uint32_t valid) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int key = lane() / 4 + i / 2 % 2 * 8;
      if (!((valid >> key) & 1)) s_[i] = -INFINITY;
    }
  }

  struct MaximumMoves {
    float rescale[4];
    float subtrahend[4];
  };
  /// Moves the maxima of this lane's heads by the largest scores of the block, over all warps.
  __device__ MaximumMoves move_maxima() {
    float(&exchange)[4][kHeads] = shared_.exchange[kTeam];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int i = j % 2 + j / 2 * 4;
      float largest = fmaxf(s_[i], s_[i + 2]);
#pragma unroll
      for (int mask = 4; mask < 32; mask *= 2)
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, mask));
      if (lane() < 4) exchange[warp()][head(j)] = largest;
    }
    sync_team();
    MaximumMoves moves;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float largest = fmaxf(fmaxf(exchange[0][head(j)], exchange[1][head(j)]),
                                  fmaxf(exchange[2][head(j)], exchange[3][head(j)]));
      state_[j].largest = fmaxf(state_[j].largest, largest);
      moves.rescale[j] =
          is_passed(state_[j], largest, scale_) ? move_maximum(state_[j], largest, scale_) : 1.0f;
      moves.subtrahend[j] = subtrahend_of(state_[j], scale_);
    }
    return moves;
  }

  __device__ float exponential(float s, float subtrahend, float maximum) const {
    if (fabsf(subtrahend) > kMaxSubtrahend) return fast_exp2((s - maximum) * scale_.scale_log2);
    return fast_exp2(fmaf(s, scale_.scale_log2, -subtrahend));
  }

  /// out^T += V^T P^T, 64 channels by 16 heads a tile. Frees the stage 16 keys at a time, so that
  /// the gather of the next block starts early.
  __device__ void multiply_values() {
    wgmma_fence();
    const std::uint32_t stage = shared_address(shared_.stages[kTeam]);
    const std::uint64_t p = k_major(shared_address(shared_.p[kTeam]));
#pragma unroll
    for (int i = 0; i < kBlock / 16; ++i) {
#pragma unroll
      for (int tile = 0; tile < kValueTiles; ++tile) {
        multiply_64x16x16<T, 1, 0>(
            out_[tile], mn_major(stage + tile * kTileBytes, kTileBytes) + i * kNextMnMajor,
            p + i * kNextKMajor, 1);
      }
      wgmma_commit();
    }
    free_after<3>();
    free_after<2>();
    free_after<1>();
    free_after<0>();
  }
  /// Frees the 16 keys of the last products but kPending groups.
  template <int kPending>
  __device__ void free_after() {
    wgmma_wait<kPending>();
    if (lane() == 0) shared_.free[kTeam][3 - kPending].arrive();
  }

  /// Puts the teams' sums together: each finishes half of the channels, and stores them.
  __device__ void finish_item(int item, int i) {
    sum_over_keys();
    // The other team has read what this one left for it with the previous item.
    shared_.sums_free[kTeam].wait(i - 1);
#pragma unroll
    for (int j = 0; j < kValueTiles; ++j) {
      const float* part = &out_[kOthers + j / 2][j % 2 * 4];
      shared_.out[kTeam][j][threadIdx.x % kWarpgroup] =
          make_float4(part[0], part[1], part[2], part[3]);
    }
    if (warp() == 0 && lane() < 4) {
#pragma unroll
      for (int j = 0; j < 4; ++j) shared_.totals[kTeam][head(j)] = state_[j];
    }
    shared_.sums_full.arrive();
    shared_.sums_full.wait(i);  // both teams' sums are there, and both are done with Q
    float own[4], other[4];
    unsigned marked_heads = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (combine(item, j, own[j], other[j])) marked_heads |= 1u << head(j);
    }
    const std::uint32_t staging = shared_address(shared_.q[i % 2]) + kTeam * kHeads * kRowBytes;
#pragma unroll
    for (int tile = 0; tile < kValueTiles / 2; ++tile) {
      stage_tile(out_[kOwn + tile], tile, own, other, staging);
    }
    shared_.sums_free[1 - kTeam].arrive();
    sync_team();
    store(item, staging);
    shared_.q_free[i % 2].arrive();
    attend_heads_in_double(item, __reduce_or_sync(0xffffffffu, marked_heads));
  }

  /// Makes the sums of the states those over all keys of the team.
  __device__ void sum_over_keys() {
    float(&exchange)[4][kHeads] = shared_.exchange[kTeam];
    sync_team();  // the maxima have been read
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float sum = state_[j].sum;
#pragma unroll
      for (int mask = 4; mask < 32; mask *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, mask);
      if (lane() < 4) exchange[warp()][head(j)] = sum;
    }
    sync_team();
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      state_[j].sum = (exchange[0][head(j)] + exchange[1][head(j)]) +
                      (exchange[2][head(j)] + exchange[3][head(j)]);
    }
  }

  /// By what this and the other team's out of one head are multiplied. Team 0 writes lse and
  /// max_logits. Returns whether the head has to be attended once more.
  __device__ bool combine(int item, int j, float& own, float& other) const {
    const int h = head(j);
    const RowState totals[2] = {shared_.totals[0][h], shared_.totals[1][h]};
    const float maximum = fmaxf(totals[0].maximum, totals[1].maximum);
    float factors[2];
#pragma unroll
    for (int team = 0; team < 2; ++team) {
      factors[team] = totals[team].maximum == -INFINITY
                          ? 0.0f
                          : fast_exp2(-scale_.rise(totals[team].maximum, maximum));
    }
    const auto logit = [&](float product) { return product * params_.power * params_.rest; };
    const bool is_there = h < params_.heads;
    const RowEnd end =
        finish_row(logit(maximum), totals[0].sum * factors[0] + totals[1].sum * factors[1],
                   is_there && params_.sink != nullptr ? __ldg(params_.sink + h) : -INFINITY);
    own = factors[kTeam] * end.normalizer;
    other = factors[1 - kTeam] * end.normalizer;
    const float largest = fmaxf(totals[0].largest, totals[1].largest);
    if (kTeam == 0 && warp() == 0 && lane() < 4 && is_there) {
      params_.lse[item * params_.lse_stride + h] = end.lse;
      if (params_.max_logits != nullptr) {
        params_.max_logits[item * params_.max_logits_stride + h] = logit(largest);
      }
    }
    return is_shared_at_large_logits(logit(maximum),
                                     end.normalizer * fast_exp2(scale_.rise(maximum, largest)));
  }

  static constexpr int kRowBytes = kValueTiles / 2 * kTileRowBytes;  // of a head, in staging
  __device__ static std::uint32_t staging_offset(int h, int piece) {
    return h * kRowBytes + ((piece ^ (h & 7)) << 4);
  }

  /// Adds the other team's half of a tile and writes it to staging as [heads, channels].
  __device__ void stage_tile(const OutTile& out, int tile, const float (&own)[4],
                             const float (&other)[4], std::uint32_t staging) const {
    std::uint32_t words[4];  // channels g and g + 8 of heads 0-7, then of heads 8-15
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float4 left = shared_.out[1 - kTeam][2 * tile + half][threadIdx.x % kWarpgroup];
      const int j = 2 * half;
      words[2 * half] = pack<T>(out[4 * half] * own[j] + left.x * other[j],
                                out[4 * half + 1] * own[j + 1] + left.y * other[j + 1]);
      words[2 * half + 1] = pack<T>(out[4 * half + 2] * own[j] + left.z * other[j],
                                    out[4 * half + 3] * own[j + 1] + left.w * other[j + 1]);
    }
    const int matrix = lane() / 8;
    store_transposed(
        staging + staging_offset(lane() % 8 + matrix / 2 * 8, tile * 8 + warp() * 2 + matrix % 2),
        words);
  }

  /// Stores this team's channels of an item, whole rows of 512 bytes a warp.
  __device__ void store(int item, std::uint32_t staging) const {
    T* target = static_cast<T*>(params_.out) + item * params_.out_token_stride +
                kTeam * (kRowBytes / 2) + lane() * 8;
#pragma unroll
    for (int i = 0; i < kHeads / 4; ++i) {
      const int h = 4 * i + warp();
      uint4 words;
      asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                   : "r"(staging + staging_offset(h, lane())));
      if (h < params_.heads)
        *reinterpret_cast<uint4*>(target + h * params_.out_head_stride) = words;
    }
  }

  /// Attends heads once more: each warp those that it has stored.
  __device__ void attend_heads_in_double(int item, unsigned heads) const {
    if (heads == 0) return;
    constexpr int kColumns = kValueTiles / 2 * kTileColumns;
#pragma unroll 1
    for (int h = warp(); h < params_.heads; h += 4) {
      if (!((heads >> h) & 1)) continue;
      attend_in_double<T>(params_, item, h, kTeam * kColumns, (kTeam + 1) * kColumns);
    }
  }

  const ForwardParameters& params_;
  SharedStorage& shared_;
  ExponentScale scale_;
  int blocks_ = 0;     // that this team has had
  float s_[8];         // S^T
  RowState state_[4];  // of the lane's heads; sums over the lane's keys
  OutTile out_[kValueTiles];
};

}  // namespace winnow::cuda::sparse_attention::forward_few_heads
