// SPDX-License-Identifier: Apache-2.0
// The narrow forward kernel's work for one query row and one group of heads: scores, softmax and
// values of a team's blocks, then the sums over teams. The map is at the head of forward_narrow.cu.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/common/mma.cuh"
#include "cuda/common/softmax.cuh"
#include "cuda/sparse_attention/forward_narrow/gather.cuh"
#include "cuda/sparse_attention/large_logits.cuh"

namespace winnow::cuda::sparse_attention::forward_narrow {

/// Loads Q's rows lane / 4 and lane / 4 + 8 as the left operand of the products: a step's first 8
/// channels in [0] and [1], the others in [2] and [3].
template <class T, int kSteps>
__device__ void load_queries(std::uint32_t (&q)[kSteps][4], const ForwardParameters& parameters,
                             std::int64_t t, int first_head, int lane) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int h = first_head + r * 8 + lane / 4;
    const T* const row = static_cast<const T*>(parameters.q) + t * parameters.q_token_stride +
                         h * parameters.q_head_stride + lane % 4 * 2;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int d = step * 16 + half * 8;
        std::uint32_t pair = 0;
        if (h < parameters.heads && d < parameters.qk_dim) {
          pair = *reinterpret_cast<const std::uint32_t*>(row + d);
        }
        q[step][half * 2 + r] = pair;
      }
    }
  }
}

/// The running softmax of rows lane / 4 and lane / 4 + 8, and their accumulators of out.
template <int kDim>
struct RowState {
  float largest[2];  // of this lane's scores
  float base[2];     // what scores are measured from; the same in the four lanes of a row
  float sum[2];      // this lane's part
  float values[kDim / 8][4];

  __device__ RowState()
      : largest{-INFINITY, -INFINITY}, base{-INFINITY, -INFINITY}, sum{0, 0}, values{} {}
};

template <class T, int kDim, int kTeam>
class RowAttention {
 public:
  using Shape = forward_narrow::Shape<T, kDim, kTeam>;
  using Storage = typename Shape::Storage;
  static constexpr int kHeads = Shape::kHeads;

  __device__ RowAttention(const ForwardParameters& parameters, unsigned char* memory)
      : parameters_(parameters),
        shared_(*reinterpret_cast<Storage*>(memory)),
        ring_(reinterpret_cast<T*>(memory + sizeof(Storage)) + team() * Shape::kRingElements),
        team_values_(reinterpret_cast<float*>(memory + sizeof(Storage))) {}

  /// The next item's normalizers are written behind a barrier.
  __device__ void run(std::int64_t t, int group_head) {
    const int first_head = group_head + warp() * 16;
    const bool has_heads = first_head < parameters_.heads;
    int slots = parameters_.topk;
    if (parameters_.lengths != nullptr) slots = max(0, min(slots, parameters_.lengths[t]));
    const int all_blocks = slots / kBlockKeys + (slots % kBlockKeys != 0 ? 1 : 0);
    const int blocks = (all_blocks - team() + kTeams - 1) / kTeams;  // of this team

    Gather<T, kDim, kTeam> gather(parameters_, parameters_.indices + t * parameters_.indices_stride,
                                  slots, ring_, team(), warp(), lane());
    clear_channels();
    Queries q;
    load_queries<T>(q, parameters_, t, first_head, lane());

    // Which slots hold a key: 16 bits of each block that has been started, the lowest those of the
    // current one.
    std::uint64_t keys = 0;
    static_assert(kStages * kBlockKeys <= 64);
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) {
      keys |= std::uint64_t{gather.start()} << (i * kBlockKeys);
    }

    RowState<kDim> state;
    int stage = 0;
    for (int block = 0; block < blocks; ++block) {
      // This block's rows are there for the whole team, and the team is done with the previous
      // block, so its stage is free for the block that is started now.
      wait_for_copies<kStages - 2>();
      wait_for_team<kTeam>(team());
      keys |= std::uint64_t{gather.start()} << ((kStages - 1) * kBlockKeys);
      const unsigned is_key = static_cast<unsigned>(keys) & kAllKeys;
      keys >>= kBlockKeys;
      const T* const rows = ring_ + stage * kBlockKeys * kRow;
      stage = stage + 1 == kStages ? 0 : stage + 1;
      if (is_key == 0 || !has_heads) continue;
      Scores scores;
      compute_scores(scores, q, rows, is_key);
      move_base(state, scores);
      add_values(state, scores, rows);
    }
    // The sums of the four lanes of a row, then those of the teams, always in the same order.
    wait_for_copies<0>();
    share_rows(state);
    __syncthreads();  // all rows' maxima and sums are there; all are done with the rings
    share_values(state);
    finish_rows(t, group_head);
    __syncthreads();  // the teams' accumulators and the normalizers are there
    store_out(t, group_head);
    __syncthreads();  // out is written; the next item's rows overwrite the accumulators
    attend_marked_heads<T, kHeads, kThreads / 32>(parameters_, t, group_head, shared_.normalizer);
  }

 private:
  static constexpr int kTeams = Shape::kTeams;
  static constexpr int kStages = Shape::kStages;
  static constexpr int kRow = Shape::kRow;
  static constexpr int kSteps = kDim / 16;
  static constexpr int kColumnsAtOnce = 64;
  using Queries = std::uint32_t[kSteps][4];
  using Scores = float[2][4];  // of 16 heads and 16 keys

  __device__ static int thread() { return static_cast<int>(threadIdx.x); }
  __device__ static int lane() { return thread() % 32; }
  __device__ static int team() { return thread() / 32 / kTeam; }
  /// Counted within the team.
  __device__ static int warp() { return thread() / 32 % kTeam; }
  /// Row r (0: lane / 4, 1: lane / 4 + 8) of this warp among the group's heads.
  __device__ static int row_of_lane(int r) { return warp() * 16 + r * 8 + lane() / 4; }

  /// The products read all kDim channels: those past qk_dim are zero, for no copy goes there.
  __device__ void clear_channels() {
    if (parameters_.qk_dim < kDim) {
      for (int row = warp() * 32 + lane(); row < kStages * kBlockKeys; row += kTeam * 32) {
        for (int d = parameters_.qk_dim; d < kDim; d += kVector) {
          *reinterpret_cast<uint4*>(ring_ + row * kRow + d) = uint4{};
        }
      }
    }
  }

  /// S = Q K^T times the power of two in the scale; -inf where a slot has no key.
  __device__ void compute_scores(Scores& scores, const Queries& q, const T* rows,
                                 unsigned is_key) const {
    const BlockOffset corner = columns_first(lane());
    // Even and odd steps are summed apart: dependent chains of products are half as long.
    float parts[2][2][4] = {};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      std::uint32_t k[4];
      load_fragments(k, rows + corner.row * kRow + corner.column + step * 16);
      multiply_add<T>(parts[step % 2][0], q[step], k[0], k[1]);
      multiply_add<T>(parts[step % 2][1], q[step], k[2], k[3]);
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        scores[n][e] = (parts[0][n][e] + parts[1][n][e]) * parameters_.power;
      }
    }
    if (is_key != kAllKeys) {
      const unsigned own = is_key >> (lane() % 4 * 2);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if ((own >> (n * 8 + e % 2) & 1) == 0) scores[n][e] = -INFINITY;
        }
      }
    }
  }

  /// exp of the logit that a difference of scores is.
  __device__ float exp_of(float difference) const {
    return fast_exp2(difference * parameters_.rest_log2);
  }

  /// Takes the scores into the maxima; moves the bases that lag too far behind and rescales their
  /// rows.
  __device__ void move_base(RowState<kDim>& state, const Scores& scores) const {
    bool has_passed = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        state.largest[r] = fmaxf(state.largest[r], fmaxf(scores[n][r * 2], scores[n][r * 2 + 1]));
      }
      has_passed |= state.largest[r] > state.base[r] + kMaxLag;
    }
    if (__any_sync(kAllLanes, has_passed)) {
      // Rows move by their own scores alone: a factor is 1 where no lane of the row has passed.
      float factor[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float m = state.largest[r];
        m = fmaxf(m, __shfl_xor_sync(kAllLanes, m, 1));
        m = fmaxf(m, __shfl_xor_sync(kAllLanes, m, 2));
        const float moved = m > state.base[r] + kMaxLag ? m : state.base[r];
        factor[r] = exp_of(state.base[r] - softmax_base(moved));
        state.base[r] = moved;
        state.sum[r] *= factor[r];
      }
#pragma unroll
      for (int n = 0; n < kSteps * 2; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) state.values[n][e] *= factor[e / 2];
      }
    }
  }

  /// P from the scores, and values += P V.
  __device__ void add_values(RowState<kDim>& state, const Scores& scores, const T* rows) const {
    const BlockOffset corner = rows_first(lane());
    // An accumulator's rows and columns are those of the next product's left operand.
    std::uint32_t p[4];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float from = softmax_base(state.base[r]);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const float p0 = exp_of(scores[n][r * 2] - from);
        const float p1 = exp_of(scores[n][r * 2 + 1] - from);
        state.sum[r] += p0 + p1;
        p[n * 2 + r] = pack<T>(p0, p1);
      }
    }
#pragma unroll
    for (int column = 0; column < kDim; column += kColumnsAtOnce) {
      if (column == 0 || column < parameters_.v_dim) {
#pragma unroll
        for (int i = column / 16; i < (column + kColumnsAtOnce) / 16; ++i) {
          std::uint32_t v[4];
          load_fragments_transposed(v, rows + corner.row * kRow + corner.column + i * 16);
          multiply_add<T>(state.values[i * 2], p, v[0], v[1]);
          multiply_add<T>(state.values[i * 2 + 1], p, v[2], v[3]);
        }
      }
    }
  }

  /// Tells the other teams this one's maxima, bases and sums.
  __device__ void share_rows(RowState<kDim>& state) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float& sum = state.sum[r];
      float& largest = state.largest[r];
      sum += __shfl_xor_sync(kAllLanes, sum, 1);
      sum += __shfl_xor_sync(kAllLanes, sum, 2);
      largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, 2));
      if (lane() % 4 == 0) {
        shared_.largest[team()][row_of_lane(r)] = largest;
        shared_.base[team()][row_of_lane(r)] = state.base[r];
        shared_.sum[team()][row_of_lane(r)] = sum;
      }
    }
  }

  __device__ float largest_of_teams(int row) const {
    float largest = shared_.largest[0][row];
#pragma unroll
    for (int i = 1; i < kTeams; ++i) largest = fmaxf(largest, shared_.largest[i][row]);
    return largest;
  }

  /// This team's accumulators, measured from the row's largest score, to shared memory.
  __device__ void share_values(const RowState<kDim>& state) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = row_of_lane(r);
      const float factor = exp_of(state.base[r] - softmax_base(largest_of_teams(row)));
      float* const to = team_values_ + (team() * kHeads + row) * kRow + lane() % 4 * 2;
#pragma unroll
      for (int n = 0; n < kSteps * 2; ++n) {
        *reinterpret_cast<float2*>(to + n * 8) =
            float2{state.values[n][r * 2] * factor, state.values[n][r * 2 + 1] * factor};
      }
    }
  }

  /// A thread a head: writes lse and max_logits, and the normalizer to shared memory.
  __device__ void finish_rows(std::int64_t t, int group_head) {
    const int row = thread();
    if (row >= kHeads) return;
    const float largest = largest_of_teams(row);
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kTeams; ++i) {
      sum += shared_.sum[i][row] * exp_of(shared_.base[i][row] - softmax_base(largest));
    }
    const int h = group_head + row;
    const bool has_sink = parameters_.sink != nullptr && h < parameters_.heads;
    const RowEnd end =
        finish_row(largest * parameters_.rest, sum, has_sink ? parameters_.sink[h] : -INFINITY);
    shared_.normalizer[row] = is_shared_at_large_logits(end.max_logit, end.normalizer)
                                  ? marked(end.normalizer)
                                  : end.normalizer;
    if (h < parameters_.heads) {
      parameters_.lse[t * parameters_.lse_stride + h] = end.lse;
      if (parameters_.max_logits != nullptr) {
        parameters_.max_logits[t * parameters_.max_logits_stride + h] = end.max_logit;
      }
    }
  }

  /// Adds up the teams' accumulators in order; a thread has 8 columns of a row at a time.
  __device__ void store_out(std::int64_t t, int group_head) {
    T* const out = static_cast<T*>(parameters_.out) + t * parameters_.out_token_stride;
#pragma unroll 1
    for (int i = thread(); i < kHeads * (kDim / kVector); i += kThreads) {
      const int row = i / (kDim / kVector);
      const int column = i % (kDim / kVector) * kVector;
      const int h = group_head + row;
      if (h >= parameters_.heads || column >= parameters_.v_dim) continue;
      float total[kVector] = {};
#pragma unroll
      for (int j = 0; j < kTeams; ++j) {
        const float* const from = team_values_ + (j * kHeads + row) * kRow + column;
#pragma unroll
        for (int e = 0; e < kVector; e += 4) {
          const float4 four = *reinterpret_cast<const float4*>(from + e);
          total[e] += four.x;
          total[e + 1] += four.y;
          total[e + 2] += four.z;
          total[e + 3] += four.w;
        }
      }
      const float normalizer = shared_.normalizer[row];
      std::uint32_t pairs[kVector / 2];
#pragma unroll
      for (int e = 0; e < kVector / 2; ++e) {
        pairs[e] = pack<T>(total[e * 2] * normalizer, total[e * 2 + 1] * normalizer);
      }
      *reinterpret_cast<uint4*>(out + h * parameters_.out_head_stride + column) =
          uint4{pairs[0], pairs[1], pairs[2], pairs[3]};
    }
  }

  const ForwardParameters& parameters_;
  Storage& shared_;
  T* ring_;             // of this team: [kStages, kBlockKeys, kRow]
  float* team_values_;  // [kTeams, kHeads, kRow], where the rings were
};

}  // namespace winnow::cuda::sparse_attention::forward_narrow
