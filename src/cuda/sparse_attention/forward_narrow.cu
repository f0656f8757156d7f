// SPDX-License-Identifier: Apache-2.0
// Sparse attention, forward, for rows of up to 256 elements in bf16 and f16, on any GPU since
// compute capability 8.0.
//
// A block computes one query for a group of 16, 32 or 64 heads by 4 warps of 16 heads each, in
// teams of 1, 2 or 4. Team i walks over blocks i, i + teams, ... of the row's slots, 16 keys each:
//   gather   8 lanes copy a row by cp.async into the team's ring of 3 or 4 stages; a slot without a
//            key is zeros. Which slots hold a key stays in a register.
//   scores   Q from registers, K out of the ring.
//   softmax  within the warp. A row's base, from which its logits are measured, moves only when a
//            logit passes it by 2^8, so sums are seldom rescaled.
//   values   P goes from the sums of the scores straight into the operand of the next product; the
//            warp's 16 heads by all columns of the values are in registers.
// The only thing that a team waits for is its next rows: no barrier of the block in the loop, and
// none at all in a team of one warp. At the end the teams' sums meet in shared memory, which the
// rings no longer need. Limits: the gather from L2 (32 flops a byte with 16 heads), with more heads
// the bandwidth of shared memory (2 to 3 cycles a product).
#include <algorithm>
#include <string>

#include "core/refusals.h"
#include "cuda/common/mma.cuh"
#include "cuda/common/runtime.h"
#include "cuda/common/softmax.cuh"
#include "cuda/sparse_attention/kernels.h"

namespace winnow::cuda {
namespace {

/// Up to here it is faster than the general kernel: that has three barriers for 64 keys, and reads
/// P and Q out of shared memory too.
constexpr std::int64_t kMaxHeads = 128;
constexpr std::int64_t kMaxDim = 256;  // what is left of the registers beside 16 heads

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * 32;
constexpr int kBlockKeys = 16;
constexpr int kLanesPerRow = 8;  // that copy a row together
constexpr int kVector = 8;       // elements of a 16-byte copy
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr unsigned kAllKeys = (1u << kBlockKeys) - 1;
constexpr float kMaxLag = 8;  // of a row's base behind its largest logit, in units of log2

struct Parameters {
  const void* q;                // [tokens, heads, qk_dim]
  const void* kv;               // [keys, qk_dim]
  const std::int32_t* indices;  // [tokens, topk]
  const std::int32_t* lengths;  // [tokens], or null
  const float* sink;            // [heads], or null
  void* out;                    // [tokens, heads, v_dim]
  float* lse;                   // [tokens, heads]
  float* max_logits;            // [tokens, heads], or null
  std::int64_t q_token_stride, q_head_stride;
  std::int64_t kv_stride;
  std::int64_t indices_stride;
  std::int64_t out_token_stride, out_head_stride;
  std::int64_t lse_stride;
  std::int64_t max_logits_stride;
  std::int64_t tokens;
  std::int64_t head_groups;
  std::int32_t heads, keys, topk, qk_dim, v_dim;
  float scale_log2;
};

/// kDim: qk_dim up to a multiple of 64. kTeam: warps that share keys.
template <class T, int kDim, int kTeam>
struct Shape {
  static constexpr int kHeads = kTeam * 16;
  static constexpr int kTeams = kWarps / kTeam;
  static constexpr int kStages = kTeam == 1 && kDim > 192 ? 3 : 4;
  static constexpr int kRow = kDim + kRowPadding;  // elements, of a stage and of the sums
  static constexpr int kRingElements = kStages * kBlockKeys * kRow;
  // Blocks for whose registers and shared memory there is room beside each other.
  static constexpr int kBlocksAtOnce = kDim > 128 ? 2 : kDim > 64 ? 3 : 4;

  /// What the warps say of their rows at the end.
  struct alignas(16) Storage {
    float largest[kTeams][kHeads];
    float base[kTeams][kHeads];
    float sum[kTeams][kHeads];
    float normalizer[kHeads];
  };
  // Behind it stand the rings [kTeams, kRingElements]; at the end, in their place, the sums of the
  // values [kTeams, kHeads, kRow] in fp32.
  static constexpr std::size_t kRingBytes = sizeof(T) * kTeams * kRingElements;
  static constexpr std::size_t kSumBytes = sizeof(float) * kTeams * kHeads * kRow;
  static constexpr std::size_t kSharedBytes = sizeof(Storage) + std::max(kRingBytes, kSumBytes);
};

/// Zeros instead where `valid` is false; then nothing is read.
__device__ inline void copy_or_clear_16_bytes_async(std::uint32_t shared, const void* global,
                                                    bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global),
               "r"(valid ? 16 : 0)
               : "memory");
}

/// What the threads of the team wrote before it is there for all of them after it.
template <int kTeam>
__device__ void wait_for_team(int team) {
  if constexpr (kTeam == 1) {
    __syncwarp();
  } else if constexpr (kTeam == kWarps) {
    __syncthreads();
  } else {
    // Barriers by constant numbers: of others the compiler would reserve all 16.
    static_assert(kWarps / kTeam == 2);
    if (team == 0) {
      asm volatile("bar.sync 1, %0;" ::"n"(kTeam * 32) : "memory");
    } else {
      asm volatile("bar.sync 2, %0;" ::"n"(kTeam * 32) : "memory");
    }
  }
}

/// The rows of a team's blocks, on their way into its ring.
template <class T, int kDim, int kTeam>
class Gather {
 public:
  using Shape = winnow::cuda::Shape<T, kDim, kTeam>;

  /// `warp` is the number in the team.
  __device__ Gather(const Parameters& parameters, const std::int32_t* indices, int slots, T* ring,
                    int team, int warp, int lane)
      : parameters_(parameters),
        indices_(indices),
        slots_(static_cast<std::uint32_t>(slots)),
        slot_(static_cast<std::uint32_t>(team * kBlockKeys + lane % kBlockKeys)),
        row_(warp * kRowsOfWarp + lane / kLanesPerRow),
        column_(lane % kLanesPerRow * kVector),
        to_(shared_address(ring + row_ * Shape::kRow + column_)) {
    load_index();
  }

  /// Starts the copies of the next block, whose indices were loaded a block before, into the next
  /// stage; a group without copies if it has no keys. Bit i: slot i holds a key.
  __device__ unsigned start() {
    constexpr int kChunk = kLanesPerRow * kVector;
    const std::int32_t key = index_ < parameters_.keys ? index_ : -1;
    const unsigned keys = __ballot_sync(kAllLanes, key >= 0) & kAllKeys;
    if (keys != 0) {
      const T* const kv = static_cast<const T*>(parameters_.kv) + column_;
      const bool has_last = kDim - kChunk + column_ < parameters_.qk_dim;
      const std::uint32_t stage =
          to_ + stage_ * (kBlockKeys * Shape::kRow * static_cast<int>(sizeof(T)));
#pragma unroll
      for (int i = 0; i < kBlockKeys; i += kRowsOfTeam) {
        const std::int32_t s = __shfl_sync(kAllLanes, key, row_ + i);
        const bool valid = s >= 0;
        const T* const from = kv + max(s, 0) * parameters_.kv_stride;
        const std::uint32_t to = stage + i * Shape::kRow * static_cast<int>(sizeof(T));
#pragma unroll
        for (int d = 0; d < kDim - kChunk; d += kChunk) {
          copy_or_clear_16_bytes_async(to + d * static_cast<int>(sizeof(T)), from + d, valid);
        }
        if (has_last) {
          constexpr int d = kDim - kChunk;
          copy_or_clear_16_bytes_async(to + d * static_cast<int>(sizeof(T)), from + d, valid);
        }
      }
    }
    commit_copies();
    stage_ = stage_ + 1 == Shape::kStages ? 0 : stage_ + 1;
    slot_ += Shape::kTeams * kBlockKeys;
    load_index();
    return keys;
  }

 private:
  static constexpr int kRowsOfWarp = 32 / kLanesPerRow;
  static constexpr int kRowsOfTeam = kRowsOfWarp * kTeam;

  /// Looks at nothing that it loads: that would be to wait for it.
  __device__ void load_index() {
    index_ = -1;
    if (slot_ < slots_) index_ = indices_[slot_];
  }

  const Parameters& parameters_;
  const std::int32_t* indices_;
  std::uint32_t slots_;
  std::uint32_t slot_;  // of the next block; lanes 16 to 31 have those of lanes 0 to 15
  int row_;             // the first of this lane in a block
  int column_;          // and where in the row
  std::uint32_t to_;    // the same in the first stage
  int stage_ = 0;       // of the next block
  std::int32_t index_;  // of slot_
};

/// Q's rows lane / 4 and lane / 4 + 8 as the left operand of the products: a step's first 8
/// channels in [0] and [1], the others in [2] and [3].
template <class T, int kSteps>
__device__ void load_queries(std::uint32_t (&q)[kSteps][4], const Parameters& parameters,
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

template <class T, int kDim, int kTeam>
__global__ void __launch_bounds__(kThreads, Shape<T, kDim, kTeam>::kBlocksAtOnce)
    attend_narrow_kernel(const __grid_constant__ Parameters parameters) {
  using Shape = winnow::cuda::Shape<T, kDim, kTeam>;
  using Storage = typename Shape::Storage;
  constexpr int kHeads = Shape::kHeads;
  constexpr int kTeams = Shape::kTeams;
  constexpr int kStages = Shape::kStages;
  constexpr int kRow = Shape::kRow;
  constexpr int kSteps = kDim / 16;
  constexpr int kColumnsAtOnce = 64;

  extern __shared__ __align__(16) unsigned char memory[];
  Storage& shared = *reinterpret_cast<Storage*>(memory);
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
  const int team = thread / 32 / kTeam;
  const int warp = thread / 32 % kTeam;  // of the team
  T* const ring = reinterpret_cast<T*>(memory + sizeof(Storage)) + team * Shape::kRingElements;
  float* const sums_of_values = reinterpret_cast<float*>(memory + sizeof(Storage));
  const int k_corner = columns_first(lane).row * kRow + columns_first(lane).column;
  const int v_corner = rows_first(lane).row * kRow + rows_first(lane).column;

  const std::int64_t work_items = parameters.tokens * parameters.head_groups;
  for (std::int64_t item = blockIdx.x; item < work_items; item += gridDim.x) {
    const std::int64_t t = item / parameters.head_groups;
    const int group_head = static_cast<int>(item % parameters.head_groups) * kHeads;
    const int first_head = group_head + warp * 16;
    const bool has_heads = first_head < parameters.heads;
    int slots = parameters.topk;
    if (parameters.lengths != nullptr) slots = max(0, min(slots, parameters.lengths[t]));
    const int all_blocks = slots / kBlockKeys + (slots % kBlockKeys != 0 ? 1 : 0);
    const int blocks = (all_blocks - team + kTeams - 1) / kTeams;  // of this team

    Gather<T, kDim, kTeam> gather(parameters, parameters.indices + t * parameters.indices_stride,
                                  slots, ring, team, warp, lane);
    // All of kDim is read: what lies past qk_dim is zero, for no copy goes there.
    if (parameters.qk_dim < kDim) {
      for (int row = warp * 32 + lane; row < kStages * kBlockKeys; row += kTeam * 32) {
        for (int d = parameters.qk_dim; d < kDim; d += kVector) {
          *reinterpret_cast<uint4*>(ring + row * kRow + d) = uint4{};
        }
      }
    }
    std::uint32_t q[kSteps][4];
    load_queries<T>(q, parameters, t, first_head, lane);

    // Which slots are keys: 16 bits of each block that has been started, the present one's lowest.
    std::uint64_t keys = 0;
    static_assert(kStages * kBlockKeys <= 64);
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) {
      keys |= std::uint64_t{gather.start()} << (i * kBlockKeys);
    }

    // Of rows lane / 4 and lane / 4 + 8.
    float largest[2] = {-INFINITY, -INFINITY};  // of this lane's logits
    float base[2] = {-INFINITY, -INFINITY};     // the same in the four lanes of a row
    float sum[2] = {0, 0};                      // this lane's part
    float values[kSteps * 2][4] = {};

    int stage = 0;
    for (int block = 0; block < blocks; ++block) {
      // This block's rows are there for the whole team, and the team is done with the block before,
      // so that its stage is free for the block that is started now.
      wait_for_copies<kStages - 2>();
      wait_for_team<kTeam>(team);
      keys |= std::uint64_t{gather.start()} << ((kStages - 1) * kBlockKeys);
      const unsigned is_key = static_cast<unsigned>(keys) & kAllKeys;
      keys >>= kBlockKeys;
      const T* const rows = ring + stage * kBlockKeys * kRow;
      stage = stage + 1 == kStages ? 0 : stage + 1;
      if (is_key == 0 || !has_heads) continue;

      // Even and odd steps apart: chains of products half as long.
      float parts[2][2][4] = {};
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        std::uint32_t k[4];
        load_fragments(k, rows + k_corner + step * 16);
        multiply_add<T>(parts[step % 2][0], q[step], k[0], k[1]);
        multiply_add<T>(parts[step % 2][1], q[step], k[2], k[3]);
      }
      float scores[2][4];
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          scores[n][e] = (parts[0][n][e] + parts[1][n][e]) * parameters.scale_log2;
        }
      }
      if (is_key != kAllKeys) {
        const unsigned own = is_key >> (lane % 4 * 2);
#pragma unroll
        for (int n = 0; n < 2; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            if ((own >> (n * 8 + e % 2) & 1) == 0) scores[n][e] = -INFINITY;
          }
        }
      }

      bool has_passed = false;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          largest[r] = fmaxf(largest[r], fmaxf(scores[n][r * 2], scores[n][r * 2 + 1]));
        }
        has_passed |= largest[r] > base[r] + kMaxLag;
      }
      if (__any_sync(kAllLanes, has_passed)) {
        // Rows move by their own logits alone: a factor is 1 where no lane of the row has passed.
        float factor[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          float m = largest[r];
          m = fmaxf(m, __shfl_xor_sync(kAllLanes, m, 1));
          m = fmaxf(m, __shfl_xor_sync(kAllLanes, m, 2));
          const float moved = m > base[r] + kMaxLag ? m : base[r];
          factor[r] = fast_exp2(base[r] - softmax_base(moved));
          base[r] = moved;
          sum[r] *= factor[r];
        }
#pragma unroll
        for (int n = 0; n < kSteps * 2; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e) values[n][e] *= factor[e / 2];
        }
      }

      // Rows and columns of a product's sums are those of the next one's left operand.
      std::uint32_t p[4];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float from = softmax_base(base[r]);
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const float p0 = fast_exp2(scores[n][r * 2] - from);
          const float p1 = fast_exp2(scores[n][r * 2 + 1] - from);
          sum[r] += p0 + p1;
          p[n * 2 + r] = pack<T>(p0, p1);
        }
      }
#pragma unroll
      for (int column = 0; column < kDim; column += kColumnsAtOnce) {
        if (column == 0 || column < parameters.v_dim) {
#pragma unroll
          for (int i = column / 16; i < (column + kColumnsAtOnce) / 16; ++i) {
            std::uint32_t v[4];
            load_fragments_transposed(v, rows + v_corner + i * 16);
            multiply_add<T>(values[i * 2], p, v[0], v[1]);
            multiply_add<T>(values[i * 2 + 1], p, v[2], v[3]);
          }
        }
      }
    }

    // Rows of four lanes, then of the teams, always in the same order.
    wait_for_copies<0>();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum[r] += __shfl_xor_sync(kAllLanes, sum[r], 1);
      sum[r] += __shfl_xor_sync(kAllLanes, sum[r], 2);
      largest[r] = fmaxf(largest[r], __shfl_xor_sync(kAllLanes, largest[r], 1));
      largest[r] = fmaxf(largest[r], __shfl_xor_sync(kAllLanes, largest[r], 2));
      if (lane % 4 == 0) {
        const int row = warp * 16 + r * 8 + lane / 4;
        shared.largest[team][row] = largest[r];
        shared.base[team][row] = base[r];
        shared.sum[team][row] = sum[r];
      }
    }
    __syncthreads();  // all rows' numbers are there; all are done with the rings
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = warp * 16 + r * 8 + lane / 4;
      float of_all = shared.largest[0][row];
#pragma unroll
      for (int i = 1; i < kTeams; ++i) of_all = fmaxf(of_all, shared.largest[i][row]);
      const float factor = fast_exp2(base[r] - softmax_base(of_all));
      float* const to = sums_of_values + (team * kHeads + row) * kRow + lane % 4 * 2;
#pragma unroll
      for (int n = 0; n < kSteps * 2; ++n) {
        *reinterpret_cast<float2*>(to + n * 8) =
            float2{values[n][r * 2] * factor, values[n][r * 2 + 1] * factor};
      }
    }
    if (thread < kHeads) {
      float of_all = shared.largest[0][thread];
#pragma unroll
      for (int i = 1; i < kTeams; ++i) of_all = fmaxf(of_all, shared.largest[i][thread]);
      float sum_of_all = 0;
#pragma unroll
      for (int i = 0; i < kTeams; ++i) {
        sum_of_all +=
            shared.sum[i][thread] * fast_exp2(shared.base[i][thread] - softmax_base(of_all));
      }
      const int h = group_head + thread;
      const bool has_sink = parameters.sink != nullptr && h < parameters.heads;
      const RowEnd end = finish_row(of_all, sum_of_all, has_sink ? parameters.sink[h] : -INFINITY);
      shared.normalizer[thread] = end.normalizer;
      if (h < parameters.heads) {
        parameters.lse[t * parameters.lse_stride + h] = end.lse;
        if (parameters.max_logits != nullptr) {
          parameters.max_logits[t * parameters.max_logits_stride + h] = end.max_logit;
        }
      }
    }
    __syncthreads();  // the teams' sums and the normalizers are there
    T* const out = static_cast<T*>(parameters.out) + t * parameters.out_token_stride;
#pragma unroll 1
    for (int i = thread; i < kHeads * (kDim / kVector); i += kThreads) {
      const int row = i / (kDim / kVector);
      const int column = i % (kDim / kVector) * kVector;
      const int h = group_head + row;
      if (h >= parameters.heads || column >= parameters.v_dim) continue;
      float total[kVector] = {};
#pragma unroll
      for (int j = 0; j < kTeams; ++j) {
        const float* const from = sums_of_values + (j * kHeads + row) * kRow + column;
#pragma unroll
        for (int e = 0; e < kVector; e += 4) {
          const float4 four = *reinterpret_cast<const float4*>(from + e);
          total[e] += four.x;
          total[e + 1] += four.y;
          total[e + 2] += four.z;
          total[e + 3] += four.w;
        }
      }
      const float normalizer = shared.normalizer[row];
      std::uint32_t pairs[kVector / 2];
#pragma unroll
      for (int e = 0; e < kVector / 2; ++e) {
        pairs[e] = pack<T>(total[e * 2] * normalizer, total[e * 2 + 1] * normalizer);
      }
      *reinterpret_cast<uint4*>(out + h * parameters.out_head_stride + column) =
          uint4{pairs[0], pairs[1], pairs[2], pairs[3]};
    }
    __syncthreads();  // the next query's rows overwrite the sums
  }
}

// ---- The launcher.

struct Choice {
  void (*kernel)(Parameters) = nullptr;
  int heads = 0;  // of a group
  std::size_t shared_bytes = 0;
};

template <class T, int kDim, int kTeam>
Choice choice_of() {
  using Shape = winnow::cuda::Shape<T, kDim, kTeam>;
  return {attend_narrow_kernel<T, kDim, kTeam>, Shape::kHeads, Shape::kSharedBytes};
}

template <class T, int kDim>
Choice choose_team(std::int64_t heads) {
  if (heads <= 16) return choice_of<T, kDim, 1>();
  return heads <= 32 ? choice_of<T, kDim, 2>() : choice_of<T, kDim, 4>();
}

template <class T>
Choice choose_dim(std::int64_t qk_dim, std::int64_t heads) {
  if (qk_dim <= 64) return choose_team<T, 64>(heads);
  if (qk_dim <= 128) return choose_team<T, 128>(heads);
  return qk_dim <= 192 ? choose_team<T, 192>(heads) : choose_team<T, 256>(heads);
}

Choice choose(const SparseAttentionForward& args) {
  const std::int64_t heads = args.q.shape[1];
  const std::int64_t qk_dim = args.q.shape[2];
  return args.q.dtype == DType::bf16 ? choose_dim<__nv_bfloat16>(qk_dim, heads)
                                     : choose_dim<__half>(qk_dim, heads);
}

std::string why_not(const SparseAttentionForward& args, const Execution&) {
  if (args.q.dtype != DType::bf16 && args.q.dtype != DType::f16)
    return sentence(refusal::takes_dtypes, "bf16 and f16");
  if (args.q.shape[2] > kMaxDim) return sentence(refusal::takes_dim_up_to, "qk_dim", kMaxDim);
  if (args.q.shape[1] > kMaxHeads) return sentence(refusal::takes_dim_up_to, "heads", kMaxHeads);
  if (!has_aligned_rows(args.q) || !has_aligned_rows(args.kv) || !has_aligned_rows(args.out)) {
    return sentence(refusal::takes_aligned_rows, "q, kv and out");
  }
  if (choose(args).shared_bytes >
      static_cast<std::size_t>(device_properties(args.q.device).shared_bytes)) {
    return refusal::too_little_shared;
  }
  return {};
}

void run(const SparseAttentionForward& args, const Execution& execution) {
  const DeviceGuard guard(args.q.device);
  const Choice choice = choose(args);
  const std::int64_t tokens = args.q.shape[0];
  const std::int64_t heads = args.q.shape[1];
  const std::int64_t head_groups = (heads + choice.heads - 1) / choice.heads;
  const Parameters parameters{.q = args.q.data,
                              .kv = args.kv.data,
                              .indices = data_of<const std::int32_t>(args.indices),
                              .lengths = data_of<const std::int32_t>(args.lengths),
                              .sink = data_of<const float>(args.sink),
                              .out = args.out.data,
                              .lse = data_of<float>(args.lse),
                              .max_logits = data_of<float>(args.max_logits),
                              .q_token_stride = args.q.stride[0],
                              .q_head_stride = args.q.stride[1],
                              .kv_stride = args.kv.stride[0],
                              .indices_stride = args.indices.stride[0],
                              .out_token_stride = args.out.stride[0],
                              .out_head_stride = args.out.stride[1],
                              .lse_stride = args.lse.stride[0],
                              .max_logits_stride = args.max_logits.stride[0],
                              .tokens = tokens,
                              .head_groups = head_groups,
                              .heads = static_cast<std::int32_t>(heads),
                              .keys = static_cast<std::int32_t>(args.kv.shape[0]),
                              .topk = static_cast<std::int32_t>(args.indices.shape[1]),
                              .qk_dim = static_cast<std::int32_t>(args.q.shape[2]),
                              .v_dim = static_cast<std::int32_t>(args.out.shape[2]),
                              .scale_log2 = static_cast<float>(args.scale * double{kLog2E})};
  launch(choice.kernel,
         {.blocks = std::min(tokens * head_groups, kMaxBlocks),
          .threads = kThreads,
          .shared_bytes = choice.shared_bytes,
          .stream = execution.stream},
         parameters);
}

}  // namespace

const winnow::Kernel<SparseAttentionForward> forward_narrow = {"narrow", why_not, no_workspace,
                                                               run};

}  // namespace winnow::cuda
