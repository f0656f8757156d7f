// SPDX-License-Identifier: Apache-2.0
// Sparse attention, backward, for rows whose tiles do not fit into the shared memory of a GPU: a
// warp has one head, its rows of q and d_out and the sum of d_q in registers, and loads every key.
//
// A block has eight heads of a query row and takes one key after another: every warp makes P and dS
// of its head by fp32 arithmetic and leaves its part of d_kv in shared memory; then all threads add
// the eight parts, in order. The limit is the fp32 arithmetic, and the barriers.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/sparse_attention/backward_general/heads.cuh"

namespace winnow::cuda::sparse_attention::backward_general {

inline constexpr int kWideHeads = 8;
inline constexpr int kWideThreads = kWideHeads * 32;
inline constexpr int kLaneChannels = 1024 / 32;  // of the widest row that the operator takes

/// Channel i of those that a lane has.
__device__ inline int channel_of(int i) { return i * 32 + static_cast<int>(threadIdx.x % 32); }

/// Loads the channels of a lane, as zeros from `dim` on; of null, all of them.
template <class T>
__device__ void load_channels(float (&to)[kLaneChannels], const T* row, int dim) {
#pragma unroll
  for (int i = 0; i < kLaneChannels; ++i) {
    const bool is_there = row != nullptr && channel_of(i) < dim;
    to[i] = is_there ? static_cast<float>(row[channel_of(i)]) : 0;
  }
}

__device__ inline float dot_of_warp(const float (&a)[kLaneChannels],
                                    const float (&b)[kLaneChannels], int dim) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kLaneChannels; ++i) {
    if (channel_of(i) < dim) sum = fmaf(a[i], b[i], sum);
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
  return sum;
}

template <class T>
__global__ void __launch_bounds__(kWideThreads, 1)
    sparse_attention_backward_wide_kernel(const __grid_constant__ BackwardParameters parameters) {
  extern __shared__ __align__(16) unsigned char memory[];
  auto* const parts = reinterpret_cast<float*>(memory);  // of d_kv: [kWideHeads, qk_dim]
  const Item item = item_of_block<kWideHeads>(parameters);
  const RowSlots slots = parameters.slots.row(item.row);
  const std::int64_t t = parameters.first_row + item.row;
  const int warp = static_cast<int>(threadIdx.x / 32);
  const int lane = static_cast<int>(threadIdx.x % 32);
  const std::int64_t head = item.first_head + warp;
  const bool has_head = head < parameters.heads;

  float q[kLaneChannels];
  float d_out[kLaneChannels];
  float d_q[kLaneChannels] = {};
  load_channels(q,
                has_head ? static_cast<const T*>(parameters.q) + t * parameters.q_token_stride +
                               head * parameters.q_head_stride
                         : nullptr,
                parameters.qk_dim);
  load_channels(d_out,
                has_head
                    ? static_cast<const T*>(parameters.d_out) + t * parameters.d_out_token_stride +
                          head * parameters.d_out_head_stride
                    : nullptr,
                parameters.v_dim);
  HeadConstants constants{};
  if (has_head) constants = constants_of_head<T>(parameters, t, head);

  float* const gradients = first_gradient(parameters, item);
  const int split_slots = (slots.count + parameters.splits - 1) / parameters.splits;
  const int first_slot = min(item.split * split_slots, slots.count);
  const int behind_slot = min(first_slot + split_slots, slots.count);
  for (int slot = first_slot; slot < behind_slot; ++slot) {
    const std::int32_t key = slots.key(slot);
    if (key < 0) continue;
    float k[kLaneChannels];
    load_channels(k, static_cast<const T*>(parameters.kv) + key * parameters.kv_stride,
                  parameters.qk_dim);
    const float product = dot_of_warp(q, k, parameters.qk_dim);
    const float d_p = dot_of_warp(d_out, k, parameters.v_dim);
    const bool counts = has_head && product * parameters.scale != -INFINITY;
    const float of_keys =
        counts ? probability<T>(fmaf(product, parameters.scale, -constants.lse)) : 0;
    const KeyTerms terms = key_terms(parameters, constants, of_keys, d_p);
    if (parameters.d_q != nullptr) {
#pragma unroll
      for (int i = 0; i < kLaneChannels; ++i) d_q[i] = fmaf(terms.d_s, k[i], d_q[i]);
    }
    if (parameters.key_gradient == KeyGradient::none) continue;
    __syncthreads();  // all have read the parts of the key before
#pragma unroll
    for (int i = 0; i < kLaneChannels; ++i) {
      if (channel_of(i) >= parameters.qk_dim) break;
      parts[warp * parameters.qk_dim + channel_of(i)] = fmaf(terms.p, d_out[i], terms.d_s * q[i]);
    }
    __syncthreads();  // the parts are there
    const int column = static_cast<int>(threadIdx.x) * 4;
    if (column < parameters.qk_dim) {
      float4 sum{};
#pragma unroll
      for (int w = 0; w < kWideHeads; ++w) {
        const auto part = *reinterpret_cast<const float4*>(parts + w * parameters.qk_dim + column);
        sum = {sum.x + part.x, sum.y + part.y, sum.z + part.z, sum.w + part.w};
      }
      float* const to =
          gradients + gradient_row(parameters, key, slot) * parameters.d_kv_stride + column;
      emit_to_key(parameters, to, sum);
    }
  }

  if (!has_head) return;
  if (parameters.d_sink != nullptr && has_keys(slots, lane) && lane == 0)
    atomicAdd(parameters.d_sink + head, constants.d_sink);
  if (parameters.d_q == nullptr) return;
  T* const to = static_cast<T*>(parameters.d_q) + t * parameters.d_q_token_stride +
                head * parameters.d_q_head_stride;
#pragma unroll
  for (int i = 0; i < kLaneChannels; ++i) {
    if (channel_of(i) < parameters.qk_dim) to[channel_of(i)] = from_float<T>(d_q[i]);
  }
}

}  // namespace winnow::cuda::sparse_attention::backward_general
