// SPDX-License-Identifier: Apache-2.0
// Sparse attention, forward, in fp32 arithmetic, for every shape.
//
// A block of 8 warps computes one query for 8 heads. It walks over the row's slots in tiles of 32
// keys (fewer where rows are wide), gathered by cp.async or element by element:
// clang-format off
//   scores   A warp has one head, a lane one key; one warp computes the softmax of a row.
//   values   A thread has every 256th column for all 8 heads, in accumulators.
// clang-format on
// There are three barriers a tile: rows are there; P and the factors are there; rows have been
// used. The SM's other block works meanwhile. Limit: the loads from shared memory, two of 16 bytes
// for four products of the scores.
#include <algorithm>

#include "core/refusals.h"
#include "cuda/common/mma.cuh"
#include "cuda/common/runtime.h"
#include "cuda/common/softmax.cuh"
#include "cuda/sparse_attention/kernels.h"
#include "cuda/sparse_attention/parameters.cuh"

namespace winnow::cuda {
namespace {

constexpr int kHeads = 8;
constexpr int kThreads = kHeads * 32;
constexpr int kMaxTileKeys = 32;
constexpr int kColumns = 4;  // of the values, per thread: 1024 in all
constexpr int kVector = 4;   // elements of a 16-byte copy
constexpr unsigned kAllLanes = 0xffffffffu;

/// The tiles of q [kHeads, row_elements] and kv [tile_keys, row_elements] follow it.
struct alignas(16) SharedStorage {
  float p[kMaxTileKeys][kHeads];
  float factor[kHeads];
};

/// An odd number of 16-byte pieces, so that eight lanes read eight rows from different banks.
__host__ __device__ constexpr int row_elements(int qk_dim) { return qk_dim + kVector; }

/// A warp copies one row; null: it writes zeros.
__device__ void copy_row(float* to, const float* from, int dim, bool aligned, int lane) {
  if (from == nullptr) {
    for (int d = lane; d < dim; d += 32) to[d] = 0;
  } else if (aligned) {
    for (int d = lane * kVector; d < dim; d += 32 * kVector) copy_16_bytes_async(to + d, from + d);
  } else {
    for (int d = lane; d < dim; d += 32) to[d] = from[d];
  }
}

__device__ float dot(const float* a, const float* b, int dim) {
  float4 sum{};
  for (int d = 0; d < dim; d += kVector) {
    const float4 x = *reinterpret_cast<const float4*>(a + d);
    const float4 y = *reinterpret_cast<const float4*>(b + d);
    sum.x = fmaf(x.x, y.x, sum.x);
    sum.y = fmaf(x.y, y.y, sum.y);
    sum.z = fmaf(x.z, y.z, sum.z);
    sum.w = fmaf(x.w, y.w, sum.w);
  }
  return (sum.x + sum.y) + (sum.z + sum.w);
}

/// The largest value of the warp's 32 lanes.
__device__ float warp_max(float x) {
  for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, step));
  return x;
}

/// The sum over the warp's 32 lanes.
__device__ float warp_sum(float x) {
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(kAllLanes, x, step);
  return x;
}

__global__ void __launch_bounds__(kThreads, 2)
    attend_f32_kernel(const __grid_constant__ ForwardParameters parameters) {
  extern __shared__ __align__(16) unsigned char memory[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(memory);
  const int stride = row_elements(parameters.qk_dim);
  float* const q_tile = reinterpret_cast<float*>(memory + sizeof(SharedStorage));
  float* const kv_tile = q_tile + kHeads * stride;
  const float* const kv = static_cast<const float*>(parameters.kv);

  const int thread = static_cast<int>(threadIdx.x);
  const int warp = thread / 32;
  const int lane = thread % 32;

  const std::int64_t items = parameters.tokens * parameters.head_groups;
  for (std::int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    const std::int64_t t = item / parameters.head_groups;
    const int first_head = static_cast<int>(item % parameters.head_groups) * kHeads;
    const int own_head = first_head + warp;  // in scores
    const bool has_head = own_head < parameters.heads;
    const std::int32_t* const indices = parameters.indices + t * parameters.indices_stride;
    int slots = parameters.topk;
    if (parameters.lengths != nullptr) slots = max(0, min(slots, parameters.lengths[t]));

    const float* const q = static_cast<const float*>(parameters.q) + t * parameters.q_token_stride;
    copy_row(q_tile + warp * stride, has_head ? q + own_head * parameters.q_head_stride : nullptr,
             parameters.qk_dim, parameters.q_aligned, lane);
    float largest = -INFINITY;
    float sum = 0;
    float values[kColumns][kHeads] = {};

    for (std::int64_t first_slot = 0; first_slot < slots; first_slot += parameters.tile_keys) {
      const auto tile_keys =
          static_cast<int>(min(slots - first_slot, std::int64_t{parameters.tile_keys}));
      // Each lane has the key of its slot; a warp copies every 8th row of the tile.
      std::int32_t key = lane < tile_keys ? indices[first_slot + lane] : -1;
      if (key >= parameters.keys) key = -1;
      for (int row = warp; row < tile_keys; row += kHeads) {
        const std::int32_t row_key = __shfl_sync(kAllLanes, key, row);
        copy_row(kv_tile + row * stride,
                 row_key < 0 ? nullptr : kv + row_key * parameters.kv_stride, parameters.qk_dim,
                 parameters.kv_aligned, lane);
      }
      commit_copies();
      wait_for_copies<0>();
      __syncthreads();  // Q and the tile's rows are there

      float s = -INFINITY;
      if (key >= 0) {
        s = dot(q_tile + warp * stride, kv_tile + lane * stride, parameters.qk_dim) *
            parameters.power;
      }
      const float new_largest = fmaxf(largest, warp_max(s));
      const float base = softmax_base(new_largest);
      const float p = exp2f((s - base) * parameters.rest_log2);
      const float factor = exp2f((largest - base) * parameters.rest_log2);
      largest = new_largest;
      sum = sum * factor + warp_sum(p);
      if (lane < tile_keys) shared.p[lane][warp] = p;
      if (lane == 0) shared.factor[warp] = factor;
      __syncthreads();  // P and the factors are there

      float factors[kHeads];
#pragma unroll
      for (int h = 0; h < kHeads; ++h) factors[h] = shared.factor[h];
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
#pragma unroll
        for (int h = 0; h < kHeads; ++h) values[i][h] *= factors[h];
      }
      for (int j = 0; j < tile_keys; ++j) {
        float weights[kHeads];
#pragma unroll
        for (int h = 0; h < kHeads; ++h) weights[h] = shared.p[j][h];
#pragma unroll
        for (int i = 0; i < kColumns; ++i) {
          const int column = thread + i * kThreads;
          if (column < parameters.v_dim) {
            const float v = kv_tile[j * stride + column];
#pragma unroll
            for (int h = 0; h < kHeads; ++h) values[i][h] = fmaf(weights[h], v, values[i][h]);
          }
        }
      }
      __syncthreads();  // rows, P and factors have been used
    }

    const float sink =
        parameters.sink != nullptr && has_head ? parameters.sink[own_head] : -INFINITY;
    const RowEnd row = finish_row(largest * parameters.rest, sum, sink);
    if (lane == 0) {
      shared.factor[warp] = row.normalizer;
      if (has_head) {
        parameters.lse[t * parameters.lse_stride + own_head] = row.lse;
        if (parameters.max_logits != nullptr) {
          parameters.max_logits[t * parameters.max_logits_stride + own_head] = row.max_logit;
        }
      }
    }
    commit_copies();
    wait_for_copies<0>();  // of Q, where there was no tile
    __syncthreads();       // the normalizers are there
    float* const out = static_cast<float*>(parameters.out) + t * parameters.out_token_stride;
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      if (first_head + h >= parameters.heads) break;
      const float normalizer = shared.factor[h];
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        const int column = thread + i * kThreads;
        if (column < parameters.v_dim) {
          out[(first_head + h) * parameters.out_head_stride + column] = values[i][h] * normalizer;
        }
      }
    }
    __syncthreads();  // the next query's Q and factors overwrite this one's
  }
}

// ---- The launcher.

std::size_t shared_bytes_of(int tile_keys, std::int64_t qk_dim) {
  return sizeof(SharedStorage) + static_cast<std::size_t>(kHeads + tile_keys) *
                                     row_elements(static_cast<int>(qk_dim)) * sizeof(float);
}

/// The most keys of a tile that leave room for a second block on the SM.
int choose_tile_keys(const SparseAttentionForward& args) {
  const auto limit = static_cast<std::size_t>(device_properties(args.q.device).shared_bytes);
  int tile_keys = kMaxTileKeys;
  while (tile_keys > 8 && shared_bytes_of(tile_keys, args.q.shape[2]) > limit / 2) tile_keys /= 2;
  return tile_keys;
}

std::string why_not(const SparseAttentionForward& args, const Execution&) {
  if (args.q.dtype == DType::f64) return refusal::no_f64;
  return args.q.dtype == DType::f32 ? "" : sentence(refusal::takes_dtypes, "f32");
}

void run(const SparseAttentionForward& args, const Execution& execution) {
  const DeviceGuard guard(args.q.device);
  const int tile_keys = choose_tile_keys(args);
  ForwardParameters parameters = forward_parameters(args, kHeads);
  parameters.tile_keys = tile_keys;
  parameters.q_aligned = has_aligned_rows(args.q);
  parameters.kv_aligned = has_aligned_rows(args.kv);
  launch(attend_f32_kernel,
         {.blocks = std::min(parameters.tokens * parameters.head_groups, kMaxBlocks),
          .threads = kThreads,
          .shared_bytes = shared_bytes_of(tile_keys, args.q.shape[2]),
          .stream = execution.stream},
         parameters);
}

}  // namespace

const winnow::Kernel<SparseAttentionForward> forward_f32 = {"f32", why_not, no_workspace, run};

}  // namespace winnow::cuda
