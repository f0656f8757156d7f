// SPDX-License-Identifier: Apache-2.0
// Rows of index_topk that need no scores: every key of the window has a slot, scores were not asked
// for, and magnitudes prove that no score can be NaN or -inf, which are never selected.
//
// First a warp finds the largest element of each key. Then a warp takes a row: the largest elements
// of its q and of the keys in its window, and the sum of its weights, bound every score. The limit
// is the memory bandwidth: q is read once, the indices are written once.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "cuda/index_topk/kernels.h"

namespace winnow::cuda::index_topk {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kBlocksPerSm = 4;
constexpr unsigned kAllLanes = 0xffffffffu;
// Sums up to this bound are finite in any order and with any rounding.
constexpr float kMostScore = 1e38f;

/// The largest magnitude of elements, taken 16 bytes at a time. Without the sign their bits are in
/// the order of magnitudes, with infinities and NaN above all finite numbers.
template <class T>
class Largest;

template <class T>
requires(sizeof(T) == 4) class Largest<T> {
 public:
  __device__ void take(uint4 four) {
    for (const std::uint32_t bits : {four.x, four.y, four.z, four.w})
      largest_ = max(largest_, bits & 0x7fff'ffffu);
  }
  __device__ float of_warp() const {
    return __uint_as_float(__reduce_max_sync(kAllLanes, largest_));
  }

 private:
  std::uint32_t largest_ = 0;
};

template <class T>
requires(sizeof(T) <= 2) class Largest<T> {
 public:
  __device__ void take(uint4 words) {
    for (const std::uint32_t bits : {words.x, words.y, words.z, words.w}) {
      if constexpr (sizeof(T) == 2) {
        pair_ = __vmaxu2(pair_, bits & 0x7fff'7fffu);
      } else {
        pair_ = __vmaxu2(pair_, bits & 0x7f00'7f00u);
        pair_ = __vmaxu2(pair_, bits << 8 & 0x7f00'7f00u);
      }
    }
  }
  __device__ float of_warp() const {
    const std::uint32_t bits = __reduce_max_sync(kAllLanes, max(pair_ >> 16, pair_ & 0xffffu));
    if constexpr (sizeof(T) == 1) {
      return static_cast<float>(__builtin_bit_cast(T, static_cast<std::uint8_t>(bits >> 8)));
    } else {
      return static_cast<float>(__builtin_bit_cast(T, static_cast<std::uint16_t>(bits)));
    }
  }

 private:
  std::uint32_t pair_ = 0;
};

template <class T>
__device__ const uint4* pieces_of(const void* base, std::int64_t element) {
  return reinterpret_cast<const uint4*>(static_cast<const T*>(base) + element);
}

template <class T>
__device__ int pieces_of_row(const ScoreInputs& inputs) {
  return inputs.dim * static_cast<int>(sizeof(T)) / static_cast<int>(sizeof(uint4));
}

/// Computes max(|k|, |scale * k|) of each key, since kernels apply the scale before or after the
/// products.
template <class T>
__global__ void __launch_bounds__(kThreads)
    index_topk_key_magnitudes_kernel(const __grid_constant__ ScoreInputs inputs, std::int64_t keys,
                                     float* magnitudes) {
  wait_for_previous_grid();
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t step = std::int64_t{gridDim.x} * kWarps;
  for (std::int64_t s = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / 32; s < keys; s += step) {
    const uint4* const pieces = pieces_of<T>(inputs.k, s * inputs.k_stride);
    Largest<T> largest;
    for (int i = lane; i < pieces_of_row<T>(inputs); i += 32) largest.take(pieces[i]);
    const float magnitude = largest.of_warp();
    const float scale = inputs.k_scale != nullptr ? fabsf(inputs.k_scale[s]) : 1.0f;
    // A scale that is NaN stays NaN.
    if (lane == 0) magnitudes[s] = scale <= 1.0f ? magnitude : magnitude * scale;
  }
}

/// The largest magnitude in a window, with NaN above all numbers, by a warp.
__device__ float largest_in_window(const float* magnitudes, int begin, int end) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  std::uint32_t largest = 0;
#pragma unroll 4
  for (int s = begin + lane; s < end; s += 32) {
    largest = max(largest, __float_as_uint(magnitudes[s]));
  }
  return __uint_as_float(__reduce_max_sync(kAllLanes, largest));
}

/// Whether no score of the row can be NaN or infinite, by a warp.
template <class T>
__device__ bool has_finite_scores(const ScoreInputs& inputs, const float* magnitudes,
                                  std::int64_t t, int begin, int end) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  Largest<T> largest;
  const uint4* const pieces = pieces_of<T>(inputs.q, t * inputs.q_token_stride);
#pragma unroll 8
  for (int i = lane; i < inputs.heads * pieces_of_row<T>(inputs); i += 32)
    largest.take(__ldcs(pieces + i));
  float weights = 0;
  for (int h = lane; h < inputs.heads; h += 32)
    weights += fabsf(inputs.weights[t * inputs.weights_stride + h]);
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2)
    weights += __shfl_xor_sync(kAllLanes, weights, distance);
  const float product = static_cast<float>(inputs.dim) * largest.of_warp() *
                        largest_in_window(magnitudes, begin, end);
  return product <= kMostScore && product * weights <= kMostScore;
}

/// Writes a row's slots by a warp: `count` keys from `begin` on, then -1.
__device__ void write_window(std::int32_t* slots, int topk, int begin, int count) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const auto key = [&](int slot) { return slot < count ? begin + slot : -1; };
  int first = 0;
  if (reinterpret_cast<std::uintptr_t>(slots) % sizeof(int4) == 0) {
    first = topk / 4 * 4;
    for (int slot = lane * 4; slot < first; slot += 32 * 4) {
      __stcs(reinterpret_cast<int4*>(slots + slot),
             int4{key(slot), key(slot + 1), key(slot + 2), key(slot + 3)});
    }
  }
  for (int slot = first + lane; slot < topk; slot += 32) slots[slot] = key(slot);
}

template <class T>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    index_topk_whole_windows_kernel(const __grid_constant__ ScoreInputs inputs,
                                    const __grid_constant__ Plan plan, const float* magnitudes,
                                    const __grid_constant__ WindowOutputs outputs) {
  wait_for_previous_grid();
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t step = std::int64_t{gridDim.x} * kWarps;
  for (std::int64_t t = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / 32; t < plan.tokens;
       t += step) {
    const int begin = plan.window_begin(t);
    const int count = max(plan.window_end(t) - begin, 0);
    const bool is_done =
        count <= outputs.topk &&
        (count == 0 || has_finite_scores<T>(inputs, magnitudes, t, begin, begin + count));
    if (is_done)
      write_window(outputs.indices + t * outputs.indices_stride, outputs.topk, begin, count);
    if (lane != 0) continue;
    outputs.done[t] = is_done;
    if (is_done && outputs.lengths != nullptr) outputs.lengths[t] = count;
  }
}

template <class T>
void launch_for(const IndexTopkForward& args, const Plan& plan, float* magnitudes,
                std::uint8_t* done, const Execution& execution) {
  const std::int64_t most_blocks =
      device_properties(args.q.device).multiprocessors * std::int64_t{kBlocksPerSm};
  const auto blocks = [&](std::int64_t rows) {
    return std::min((rows + kWarps - 1) / kWarps, most_blocks);
  };
  launch(
      index_topk_key_magnitudes_kernel<T>,
      {.blocks = blocks(plan.keys), .threads = kThreads, .stream = execution.stream, .pdl = true},
      score_inputs(args), plan.keys, magnitudes);
  launch(
      index_topk_whole_windows_kernel<T>,
      {.blocks = blocks(plan.tokens), .threads = kThreads, .stream = execution.stream, .pdl = true},
      score_inputs(args), plan, magnitudes,
      WindowOutputs{.indices = data_of<std::int32_t>(args.indices),
                    .lengths = data_of<std::int32_t>(args.lengths),
                    .done = done,
                    .indices_stride = args.indices.stride[0],
                    .topk = static_cast<int>(args.indices.shape[1])});
}

}  // namespace

bool has_whole_windows(const IndexTopkForward& args) {
  if (args.scores || args.order != SlotOrder::ascending) return false;
  const std::int64_t dim = args.q.shape[2];
  return dim * element_bytes(args.q.dtype) % sizeof(uint4) == 0 && has_aligned_rows(args.q) &&
         has_aligned_rows(args.k) && (args.q.shape[1] == 1 || args.q.stride[1] == dim);
}

void take_whole_windows(const IndexTopkForward& args, const Plan& plan, float* magnitudes,
                        std::uint8_t* done, const Execution& execution) {
  switch (args.q.dtype) {
    case DType::bf16:
      return launch_for<__nv_bfloat16>(args, plan, magnitudes, done, execution);
    case DType::f16:
      return launch_for<__half>(args, plan, magnitudes, done, execution);
    case DType::f32:
      return launch_for<float>(args, plan, magnitudes, done, execution);
    default:
      return launch_for<__nv_fp8_e4m3>(args, plan, magnitudes, done, execution);
  }
}

}  // namespace winnow::cuda::index_topk
