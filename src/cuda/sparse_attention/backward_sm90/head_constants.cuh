// SPDX-License-Identifier: Apache-2.0
// delta = out . d_out and what else the scores of a head need.
#pragma once

#include <cstdint>

#include "cuda/sparse_attention/backward_sm90/shared.cuh"

namespace winnow::cuda::sparse_attention::backward_sm90 {

template <class T>
__device__ float dot_8(uint4 a, uint4 b) {
  const std::uint32_t x[4] = {a.x, a.y, a.z, a.w};
  const std::uint32_t y[4] = {b.x, b.y, b.z, b.w};
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 u = unpack_pair<T>(x[i]);
    const float2 v = unpack_pair<T>(y[i]);
    sum = fmaf(u.x, v.x, fmaf(u.y, v.y, sum));
  }
  return sum;
}

/// The order of delta's sum, which every pass keeps, so that all of them see the same bits: that of
/// so many lanes, which share a head's pieces of eight columns in turns and add up their sums by
/// halves.
inline constexpr int kDeltaLanes = 8;

/// What a head's constants need beside delta; zeros past the last head.
struct HeadInputs {
  float lse = 0;
  float sink = 0;
  float d_lse = 0;
};
template <class T>
__device__ HeadInputs load_inputs(const BackwardSm90Parameters<T>& params, std::int64_t t,
                                  int head) {
  HeadInputs inputs;
  if (head >= params.heads) return inputs;
  inputs.lse = __ldg(params.lse + t * params.lse_stride + head);
  if (params.sink != nullptr) inputs.sink = __ldg(params.sink + head);
  if (params.d_lse != nullptr) inputs.d_lse = __ldg(params.d_lse + t * params.d_lse_stride + head);
  return inputs;
}

/// The constants of a head of the query.
__device__ inline HeadConstants head_constants(const HeadInputs& inputs, bool has_sink,
                                               float delta) {
  HeadConstants constants{};
  constants.share = 1;
  if (has_sink) {
    // The exponential is at most 1, so that nothing overflows.
    const float lesser = expf(-fabsf(inputs.lse - inputs.sink));
    const float larger_share = 1 / (1 + lesser);
    const float lesser_share = lesser / (1 + lesser);
    constants.share = inputs.lse >= inputs.sink ? larger_share : lesser_share;
    constants.d_sink = -delta * (inputs.lse >= inputs.sink ? lesser_share : larger_share);
  }
  constants.lse_log2 = inputs.lse * kLog2E;
  constants.offset = fmaf(-constants.share, delta, inputs.d_lse);
  return constants;
}

/// Computes delta and the constants of the heads of an item, zeros past the last head. 256 threads
/// take part, four lanes a head; store(head of the item, constants) is called once for each, and
/// visit(words) for all parts of a head's d_out that a lane reads.
template <class T, class Visit, class Store>
__device__ void for_each_head(const BackwardSm90Parameters<T>& params, const Item& item, int thread,
                              Visit visit, Store store) {
  const int c = thread % 4;
  const int head = item.first_head + thread / 4;
  const bool is_head = head < params.heads;
  constexpr int kParts = kDeltaLanes / 4;
  float parts[kParts] = {};  // of delta: what lanes c, c + 4, ... would have
  if (is_head) {
    const T* const out =
        params.out + item.t * params.out_token_stride + head * params.out_head_stride;
    const T* const d_out =
        params.d_out + item.t * params.d_out_token_stride + head * params.d_out_head_stride;
#pragma unroll 4
    for (int i = 0; i < kValueTiles * kTileColumns / 32; ++i) {
      const uint4 words = __ldg(reinterpret_cast<const uint4*>(d_out + i * 32 + c * 8));
      parts[i % kParts] +=
          dot_8<T>(__ldg(reinterpret_cast<const uint4*>(out + i * 32 + c * 8)), words);
      visit(words);
    }
  }
#pragma unroll
  for (int count = kParts / 2; count > 0; count /= 2) {
#pragma unroll
    for (int i = 0; i < count; ++i) parts[i] += parts[i + count];
  }
  float delta = parts[0];
  delta += __shfl_xor_sync(0xffffffffu, delta, 2);
  delta += __shfl_xor_sync(0xffffffffu, delta, 1);
  HeadConstants constants{};
  if (is_head) {
    constants = head_constants(load_inputs(params, item.t, head), params.sink != nullptr, delta);
  }
  if (c == 0) store(thread / 4, constants);
}

}  // namespace winnow::cuda::sparse_attention::backward_sm90
