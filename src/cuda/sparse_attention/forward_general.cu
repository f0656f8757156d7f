// SPDX-License-Identifier: Apache-2.0
// Sparse attention, forward, for every shape in bf16 and f16, on any GPU since compute capability
// 8.0.
//
// A block computes one query for a group of 16, 32 or 64 heads; 4 or 8 warps. It walks over the
// row's slots in tiles of 64 keys (32 or 16 where rows are wide):
//   gather   8 lanes copy a row by cp.async; a slot without a key is zeros. With two stages the
//            next tile is on its way during the products of this one.
//   scores   a warp has 16 keys and 16 or 32 heads; Q and K come out of shared memory.
//   softmax  the largest of a row goes through shared memory between the four warps that share it,
//            P back through shared memory, rounded to the type of the inputs.
//   values   a warp has all heads and every 4th or 8th 16 columns, its sums in registers.
// Three barriers a tile: rows are there; maxima are there; P and the factors are there. Limits: the
// bandwidth of shared memory (3 to 4 cycles a product), then that of the gather.
#include <algorithm>
#include <array>
#include <type_traits>

#include "core/refusals.h"
#include "cuda/common/mma.cuh"
#include "cuda/common/runtime.h"
#include "cuda/common/softmax.cuh"
#include "cuda/sparse_attention/kernels.h"

namespace winnow::cuda {
namespace {

constexpr int kMaxTileKeys = 64;
constexpr int kBlockKeys = 16;                         // that one warp scores
constexpr int kKeyBlocks = kMaxTileKeys / kBlockKeys;  // warps that share the heads of a tile
constexpr int kMaxStages = 2;
constexpr int kLanesPerRow = 8;  // that copy a row together
constexpr int kVector = 8;       // elements of a 16-byte copy
constexpr unsigned kAllLanes = 0xffffffffu;

template <int kHeads>
constexpr int kWarps = kHeads == 16 ? 4 : 8;
/// Blocks for whose registers there must be room beside each other: as many as leave them enough.
template <int kHeads, int kPairs>
constexpr int kBlocksAtOnce = kHeads / 16 * kPairs > 8 ? 1
                              : kHeads > 16            ? 2
                              : kPairs > 4             ? 3
                                                       : 4;

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
  std::int32_t tile_keys, stages;
  bool q_aligned, kv_aligned;  // rows at 16-byte boundaries
  bool out_aligned;            // pairs of elements at 4-byte boundaries
  float scale_log2;
};

/// Behind it stand the tiles of q [kHeads, row_elements] and kv [stages, tile_keys, row_elements].
template <class T, int kHeads>
struct alignas(16) SharedStorage {
  T p[kHeads][kMaxTileKeys + kRowPadding];
  std::int32_t key[kMaxStages][kMaxTileKeys];  // of each slot; -1: none
  float partial[kKeyBlocks][kHeads];           // of a tile's 16 keys: the largest, at last the sum
  float factor[kHeads];                        // what earlier sums of values are multiplied by
  float largest[kHeads];
};

__host__ __device__ constexpr int padded_dim(int qk_dim) { return (qk_dim + 15) / 16 * 16; }
__host__ __device__ constexpr int row_elements(int qk_dim) {
  return padded_dim(qk_dim) + kRowPadding;
}

/// Eight lanes copy one row; null: zeros.
template <class T>
__device__ void copy_row(T* to, const T* from, int dim, bool aligned, int lane) {
  if (from == nullptr) {
#pragma unroll 1
    for (int d = lane * kVector; d < dim; d += kLanesPerRow * kVector) {
      *reinterpret_cast<uint4*>(to + d) = uint4{};
    }
  } else if (aligned) {
    for (int d = lane * kVector; d < dim; d += kLanesPerRow * kVector) {
      copy_16_bytes_async(to + d, from + d);
    }
  } else {
#pragma unroll 1
    for (int d = lane; d < dim; d += kLanesPerRow) to[d] = from[d];
  }
}

/// The rows of one query's slots, on their way into shared memory.
template <class T, int kThreads>
class Gather {
 public:
  static constexpr int kGroups = kThreads / kLanesPerRow;
  static constexpr int kRows = kMaxTileKeys / kGroups;

  __device__ Gather(const Parameters& parameters, const std::int32_t* indices, int slots)
      : parameters_(parameters), indices_(indices), slots_(slots) {
    load_keys(0);
  }

  /// Copies the rows of a tile, whose keys were loaded a tile before, and loads the next one's.
  __device__ void start(int tile, T* rows, std::int32_t* keys) {
    const T* const kv = static_cast<const T*>(parameters_.kv);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int row = group_ + i * kGroups;
      if (row >= parameters_.tile_keys) break;
      const T* const from = next_[i] < 0 ? nullptr : kv + next_[i] * parameters_.kv_stride;
      copy_row(rows + row * row_elements(parameters_.qk_dim), from, parameters_.qk_dim,
               parameters_.kv_aligned, lane_);
      if (lane_ == 0) keys[row] = next_[i];
    }
    commit_copies();
    load_keys(tile + 1);
  }

 private:
  __device__ void load_keys(int tile) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int row = group_ + i * kGroups;
      const std::int64_t slot = std::int64_t{tile} * parameters_.tile_keys + row;
      next_[i] = -1;
      if (row < parameters_.tile_keys && slot < slots_) {
        const std::int32_t key = indices_[slot];
        if (key >= 0 && key < parameters_.keys) next_[i] = key;
      }
    }
  }

  const Parameters& parameters_;
  const std::int32_t* indices_;
  int slots_;
  int group_ = static_cast<int>(threadIdx.x) / kLanesPerRow;
  int lane_ = static_cast<int>(threadIdx.x) % kLanesPerRow;
  std::int32_t next_[kRows];
};

/// kPairs: blocks of 16 columns of the values that a warp has.
template <class T, int kHeads, int kPairs>
__global__ void __launch_bounds__(kWarps<kHeads> * 32, kBlocksAtOnce<kHeads, kPairs>)
    attend_kernel(const __grid_constant__ Parameters parameters) {
  constexpr int kThreads = kWarps<kHeads> * 32;
  constexpr int kHeadBlocks = kHeads / 16;
  constexpr int kScoreBlocks = kHeadBlocks / (kWarps<kHeads> / kKeyBlocks);  // of heads, a warp's
  using Storage = SharedStorage<T, kHeads>;

  extern __shared__ __align__(16) unsigned char memory[];
  Storage& shared = *reinterpret_cast<Storage*>(memory);
  const int dim = padded_dim(parameters.qk_dim);
  const int stride = row_elements(parameters.qk_dim);
  T* const q_tile = reinterpret_cast<T*>(memory + sizeof(Storage));
  T* const kv_tiles = q_tile + kHeads * stride;

  const int thread = static_cast<int>(threadIdx.x);
  const int warp = thread / 32;
  const int lane = thread % 32;
  const int key_block = warp % kKeyBlocks;
  const int score_head = warp / kKeyBlocks * kScoreBlocks * 16;  // the first that this warp scores
  const BlockOffset by_rows = rows_first(lane);
  const BlockOffset by_columns = columns_first(lane);

  // Channels up to a multiple of 16 are read: those past qk_dim are zero, in all rows for ever.
  if (dim > parameters.qk_dim) {
    const int rows = kHeads + parameters.stages * parameters.tile_keys;
    for (int row = thread; row < rows; row += kThreads) {
      *reinterpret_cast<uint4*>(q_tile + row * stride + parameters.qk_dim) = uint4{};
    }
  }

  const std::int64_t work_items = parameters.tokens * parameters.head_groups;
  for (std::int64_t item = blockIdx.x; item < work_items; item += gridDim.x) {
    const std::int64_t t = item / parameters.head_groups;
    const int first_head = static_cast<int>(item % parameters.head_groups) * kHeads;
    int slots = parameters.topk;
    if (parameters.lengths != nullptr) slots = max(0, min(slots, parameters.lengths[t]));
    const int tiles = slots / parameters.tile_keys + (slots % parameters.tile_keys != 0 ? 1 : 0);

    const T* const q = static_cast<const T*>(parameters.q) + t * parameters.q_token_stride;
    for (int row = thread / kLanesPerRow; row < kHeads; row += kThreads / kLanesPerRow) {
      const int h = first_head + row;
      copy_row(q_tile + row * stride,
               h < parameters.heads ? q + h * parameters.q_head_stride : nullptr, parameters.qk_dim,
               parameters.q_aligned, thread % kLanesPerRow);
    }
    commit_copies();
    Gather<T, kThreads> gather(parameters, parameters.indices + t * parameters.indices_stride,
                               slots);
    if (tiles > 0) gather.start(0, kv_tiles, shared.key[0]);

    float running[kScoreBlocks][2];  // the largest of rows lane / 4 and lane / 4 + 8 so far
    float sums[kScoreBlocks][2];     // this lane's part
    float values[kHeadBlocks][kPairs * 2][4] = {};
#pragma unroll
    for (int i = 0; i < kScoreBlocks; ++i) {
      running[i][0] = running[i][1] = -INFINITY;
      sums[i][0] = sums[i][1] = 0;
    }

    for (int tile = 0; tile < tiles; ++tile) {
      const int stage = parameters.stages == 1 ? 0 : tile % 2;
      T* const kv_tile = kv_tiles + stage * parameters.tile_keys * stride;
      const int keys_left = slots - tile * parameters.tile_keys;
      const int blocks = (min(keys_left, parameters.tile_keys) + kBlockKeys - 1) / kBlockKeys;

      // Q and this tile's rows are there for all; all are done with the tile before, so that its
      // stage is free for the next one.
      wait_for_copies<0>();
      __syncthreads();
      if (parameters.stages == 2 && tile + 1 < tiles) {
        gather.start(tile + 1, kv_tiles + (stage ^ 1) * parameters.tile_keys * stride,
                     shared.key[stage ^ 1]);
      }

      float scores[kScoreBlocks][2][4] = {};
      if (key_block < blocks) {
        const T* const q_row = q_tile + (score_head + by_rows.row) * stride + by_rows.column;
        const T* const k_row =
            kv_tile + (key_block * kBlockKeys + by_columns.row) * stride + by_columns.column;
#pragma unroll 4
        for (int d = 0; d < dim; d += 16) {
          std::uint32_t k[4];
          load_fragments(k, k_row + d);
#pragma unroll
          for (int i = 0; i < kScoreBlocks; ++i) {
            std::uint32_t a[4];
            load_fragments(a, q_row + i * 16 * stride + d);
            multiply_add<T>(scores[i][0], a, k[0], k[1]);
            multiply_add<T>(scores[i][1], a, k[2], k[3]);
          }
        }
        const int first_slot = key_block * kBlockKeys + lane % 4 * 2;
        float largest[kScoreBlocks][2];
#pragma unroll
        for (int i = 0; i < kScoreBlocks; ++i) largest[i][0] = largest[i][1] = -INFINITY;
#pragma unroll
        for (int n = 0; n < 2; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const bool is_key = shared.key[stage][first_slot + n * 8 + e % 2] >= 0;
#pragma unroll
            for (int i = 0; i < kScoreBlocks; ++i) {
              float& s = scores[i][n][e];
              s = is_key ? s * parameters.scale_log2 : -INFINITY;
              largest[i][e / 2] = fmaxf(largest[i][e / 2], s);
            }
          }
        }
#pragma unroll
        for (int i = 0; i < kScoreBlocks; ++i) {
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            float& m = largest[i][r];
            m = fmaxf(m, __shfl_xor_sync(kAllLanes, m, 1));
            m = fmaxf(m, __shfl_xor_sync(kAllLanes, m, 2));
            if (lane % 4 == 0) {
              shared.partial[key_block][score_head + i * 16 + r * 8 + lane / 4] = m;
            }
          }
        }
      }

      // The tile's maxima are there; the factors and P of the tile before have been used.
      __syncthreads();
#pragma unroll
      for (int i = 0; i < kScoreBlocks; ++i) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int row = score_head + i * 16 + r * 8 + lane / 4;
          float largest = running[i][r];
#pragma unroll
          for (int block = 0; block < kKeyBlocks; ++block) {
            if (block < blocks) largest = fmaxf(largest, shared.partial[block][row]);
          }
          const float base = softmax_base(largest);
          const float factor = fast_exp2(running[i][r] - base);
          running[i][r] = largest;
          sums[i][r] *= factor;
          if (key_block == 0 && lane % 4 == 0) shared.factor[row] = factor;
          if (key_block < blocks) {
#pragma unroll
            for (int n = 0; n < 2; ++n) {
              const float p0 = fast_exp2(scores[i][n][r * 2] - base);
              const float p1 = fast_exp2(scores[i][n][r * 2 + 1] - base);
              sums[i][r] += p0 + p1;
              const int slot = key_block * kBlockKeys + n * 8 + lane % 4 * 2;
              *reinterpret_cast<std::uint32_t*>(&shared.p[row][slot]) = pack<T>(p0, p1);
            }
          }
        }
      }

      // P and the factors are there; the maxima have been used.
      __syncthreads();
      bool has_grown = false;
      float factors[kHeadBlocks][2];
#pragma unroll
      for (int m = 0; m < kHeadBlocks; ++m) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          factors[m][r] = shared.factor[m * 16 + r * 8 + lane / 4];
          has_grown |= factors[m][r] != 1;
        }
      }
      if (__any_sync(kAllLanes, has_grown)) {
#pragma unroll
        for (int m = 0; m < kHeadBlocks; ++m) {
#pragma unroll
          for (int n = 0; n < kPairs * 2; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) values[m][n][e] *= factors[m][e / 2];
          }
        }
      }
#pragma unroll 1
      for (int block = 0; block < blocks; ++block) {
        std::uint32_t p[kHeadBlocks][4];
#pragma unroll
        for (int m = 0; m < kHeadBlocks; ++m) {
          load_fragments(p[m],
                         &shared.p[m * 16 + by_rows.row][block * kBlockKeys + by_rows.column]);
        }
        const T* const v_row =
            kv_tile + (block * kBlockKeys + by_rows.row) * stride + by_rows.column;
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
          const int column = (warp + i * kWarps<kHeads>)*16;
          if (column < parameters.v_dim) {
            std::uint32_t v[4];
            load_fragments_transposed(v, v_row + column);
#pragma unroll
            for (int m = 0; m < kHeadBlocks; ++m) {
              multiply_add<T>(values[m][i * 2], p[m], v[0], v[1]);
              multiply_add<T>(values[m][i * 2 + 1], p[m], v[2], v[3]);
            }
          }
        }
      }

      if (parameters.stages == 1 && tile + 1 < tiles) {
        __syncthreads();  // all are done with this tile's rows
        gather.start(tile + 1, kv_tiles, shared.key[0]);
      }
    }

    // Sums of the four lanes and of the four warps that share a row. The maxima in `partial` were
    // last read before the last barrier.
#pragma unroll
    for (int i = 0; i < kScoreBlocks; ++i) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float& sum = sums[i][r];
        sum += __shfl_xor_sync(kAllLanes, sum, 1);
        sum += __shfl_xor_sync(kAllLanes, sum, 2);
        const int row = score_head + i * 16 + r * 8 + lane / 4;
        if (lane % 4 == 0) shared.partial[key_block][row] = sum;
        if (key_block == 0 && lane % 4 == 0) shared.largest[row] = running[i][r];
      }
    }
    wait_for_copies<0>();  // of Q, where there was no tile
    __syncthreads();
    if (thread < kHeads) {
      const int h = first_head + thread;
      float sum = 0;
#pragma unroll
      for (int block = 0; block < kKeyBlocks; ++block) sum += shared.partial[block][thread];
      const bool has_sink = parameters.sink != nullptr && h < parameters.heads;
      const RowEnd row =
          finish_row(shared.largest[thread], sum, has_sink ? parameters.sink[h] : -INFINITY);
      shared.factor[thread] = row.normalizer;
      if (h < parameters.heads) {
        parameters.lse[t * parameters.lse_stride + h] = row.lse;
        if (parameters.max_logits != nullptr) {
          parameters.max_logits[t * parameters.max_logits_stride + h] = row.max_logit;
        }
      }
    }
    __syncthreads();
    T* const out = static_cast<T*>(parameters.out) + t * parameters.out_token_stride;
#pragma unroll
    for (int m = 0; m < kHeadBlocks; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = m * 16 + r * 8 + lane / 4;
        const int h = first_head + row;
        if (h >= parameters.heads) continue;
        const float normalizer = shared.factor[row];
        T* const out_row = out + h * parameters.out_head_stride + lane % 4 * 2;
#pragma unroll
        for (int n = 0; n < kPairs * 2; ++n) {
          const int column = (warp + n / 2 * kWarps<kHeads>)*16 + n % 2 * 8;
          if (column < parameters.v_dim) {
            store_pair(out_row + column, values[m][n][r * 2] * normalizer,
                       values[m][n][r * 2 + 1] * normalizer, parameters.out_aligned);
          }
        }
      }
    }
    __syncthreads();  // the next query's Q and factors overwrite this one's
  }
}

// ---- The launcher.

struct Tile {
  int heads = 0;
  int keys = 0;
  int stages = 0;
  std::size_t shared_bytes = 0;
};

std::size_t shared_bytes_of(int heads, int keys, int stages, int qk_dim) {
  const std::size_t fixed = heads == 64   ? sizeof(SharedStorage<__half, 64>)
                            : heads == 32 ? sizeof(SharedStorage<__half, 32>)
                                          : sizeof(SharedStorage<__half, 16>);
  return fixed +
         static_cast<std::size_t>(heads + stages * keys) * row_elements(qk_dim) * sizeof(__half);
}

/// The largest tile that fits, first of all with two stages. 64 heads have registers for 512
/// columns of values.
Tile choose_tile(const SparseAttentionForward& args) {
  struct KeysAndStages {
    int keys, stages;
  };
  const auto heads = args.q.shape[1];
  const auto qk_dim = static_cast<int>(args.q.shape[2]);
  const auto limit = static_cast<std::size_t>(device_properties(args.q.device).shared_bytes);
  int rows = heads > 32 && args.out.shape[2] <= 512 ? 64 : heads > 16 ? 32 : 16;
  for (; rows >= 16; rows /= 2) {
    for (const auto [keys, stages] :
         {KeysAndStages{64, 2}, {32, 2}, {64, 1}, {32, 1}, {16, 2}, {16, 1}}) {
      const std::size_t bytes = shared_bytes_of(rows, keys, stages, qk_dim);
      if (bytes <= limit) return {rows, keys, stages, bytes};
    }
  }
  return {};
}

using Kernel = void (*)(Parameters);

template <class T>
Kernel choose_kernel(const Tile& tile, std::int64_t v_dim) {
  const std::int64_t pairs = (v_dim + 15) / 16;
  if (tile.heads == 64) return pairs <= 16 ? attend_kernel<T, 64, 2> : attend_kernel<T, 64, 4>;
  if (tile.heads == 32) {
    if (pairs <= 16) return attend_kernel<T, 32, 2>;
    return pairs <= 32 ? attend_kernel<T, 32, 4> : attend_kernel<T, 32, 8>;
  }
  if (pairs <= 16) return attend_kernel<T, 16, 4>;
  return pairs <= 32 ? attend_kernel<T, 16, 8> : attend_kernel<T, 16, 16>;
}

/// Whether pairs of elements can be stored at once.
bool has_aligned_pairs(const Tensor& tensor) {
  auto bits = reinterpret_cast<std::uintptr_t>(tensor.data) / 2;
  for (int i = 0; i < 2; ++i) {
    if (tensor.shape[i] > 1) bits |= static_cast<std::uintptr_t>(tensor.stride[i]);
  }
  return bits % 2 == 0;
}

std::string why_not(const SparseAttentionForward& args, const Execution&) {
  if (args.q.dtype != DType::bf16 && args.q.dtype != DType::f16)
    return sentence(refusal::takes_dtypes, "bf16 and f16");
  if (choose_tile(args).heads == 0) return refusal::too_little_shared;
  return {};
}

void run(const SparseAttentionForward& args, const Execution& execution) {
  const DeviceGuard guard(args.q.device);
  const Tile tile = choose_tile(args);
  const std::int64_t tokens = args.q.shape[0];
  const std::int64_t heads = args.q.shape[1];
  const std::int64_t head_groups = (heads + tile.heads - 1) / tile.heads;
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
                              .tile_keys = tile.keys,
                              .stages = tile.stages,
                              .q_aligned = has_aligned_rows(args.q),
                              .kv_aligned = has_aligned_rows(args.kv),
                              .out_aligned = has_aligned_pairs(args.out),
                              .scale_log2 = static_cast<float>(args.scale * double{kLog2E})};
  const Kernel kernel = args.q.dtype == DType::bf16
                            ? choose_kernel<__nv_bfloat16>(tile, args.out.shape[2])
                            : choose_kernel<__half>(tile, args.out.shape[2]);
  launch(kernel,
         {.blocks = std::min(tokens * head_groups, kMaxBlocks),
          .threads = tile.heads == 16 ? kWarps<16> * 32 : kWarps<64> * 32,
          .shared_bytes = tile.shared_bytes,
          .stream = execution.stream},
         parameters);
}

}  // namespace

const winnow::Kernel<SparseAttentionForward> forward_general = {"general", why_not, no_workspace,
                                                                run};

}  // namespace winnow::cuda
