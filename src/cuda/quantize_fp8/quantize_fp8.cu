// SPDX-License-Identifier: Apache-2.0
// Quantisation of rows to e4m3. A warp reads a row twice, for its largest element and for the
// quotients; the second read hits a cache. A lane takes four elements at a time where rows allow
// it. The limit is the memory bandwidth.
#include <cmath>

#include <cuda_fp8.h>

#include "backend_operators.h"
#include "cuda/common/mma.cuh"
#include "cuda/common/runtime.h"

namespace winnow::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr float kLeastMaximum = 1e-4f;
constexpr float kFloat8Max = 448;

struct Parameters {
  const void* x;               // [tokens, heads, dim]
  __nv_fp8_storage_t* values;  // [tokens, heads, dim]
  float* scale;                // [tokens, heads]
  std::int64_t x_token_stride, x_head_stride;
  std::int64_t values_token_stride, values_head_stride;
  std::int64_t scale_token_stride;
  std::int64_t tokens, heads, dim;
  bool power_of_two;
};

/// kAtOnce elements that are loaded or stored by one instruction.
template <class T, int kAtOnce>
struct alignas(sizeof(T) * kAtOnce) Elements {
  T of[kAtOnce];
};

/// The smallest power of two that is no smaller than x, which is normal and positive.
__device__ float round_up_to_power_of_two(float x) {
  return __uint_as_float((__float_as_uint(x) + 0x7fffffu) & 0xff800000u);
}

template <class T, int kAtOnce>
__global__ void __launch_bounds__(kThreads)
    quantize_kernel(const __grid_constant__ Parameters parameters) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t rows = parameters.tokens * parameters.heads;
  const std::int64_t step = std::int64_t{gridDim.x} * kWarps;
  for (std::int64_t row = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / 32; row < rows;
       row += step) {
    const std::int64_t t = row / parameters.heads;
    const std::int64_t h = row % parameters.heads;
    const T* const x = static_cast<const T*>(parameters.x) + t * parameters.x_token_stride +
                       h * parameters.x_head_stride;
    __nv_fp8_storage_t* const values =
        parameters.values + t * parameters.values_token_stride + h * parameters.values_head_stride;
    float largest = kLeastMaximum;
    for (std::int64_t d = lane * kAtOnce; d < parameters.dim; d += 32 * kAtOnce) {
      const auto elements = *reinterpret_cast<const Elements<T, kAtOnce>*>(x + d);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const float magnitude = fabsf(static_cast<float>(elements.of[i]));
        if (magnitude < INFINITY) largest = fmaxf(largest, magnitude);
      }
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, distance));
    }
    float scale = largest / kFloat8Max;
    if (parameters.power_of_two) scale = round_up_to_power_of_two(scale);
    for (std::int64_t d = lane * kAtOnce; d < parameters.dim; d += 32 * kAtOnce) {
      const auto elements = *reinterpret_cast<const Elements<T, kAtOnce>*>(x + d);
      Elements<__nv_fp8_storage_t, kAtOnce> rounded;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        // Rounds to nearest even; infinities become the largest finite number, NaN stays NaN.
        rounded.of[i] = __nv_cvt_float_to_fp8(static_cast<float>(elements.of[i]) / scale,
                                              __NV_SATFINITE, __NV_E4M3);
      }
      *reinterpret_cast<Elements<__nv_fp8_storage_t, kAtOnce>*>(values + d) = rounded;
    }
    if (lane == 0) parameters.scale[t * parameters.scale_token_stride + h] = scale;
  }
}

/// Whether all rows consist of aligned groups of `count` elements.
bool has_groups(const Tensor& tensor, std::int64_t count) {
  const std::int64_t bytes = count * element_bytes(tensor.dtype);
  if (reinterpret_cast<std::uintptr_t>(tensor.data) % static_cast<std::uintptr_t>(bytes) != 0) {
    return false;
  }
  bool divides = tensor.shape[tensor.rank - 1] % count == 0;
  for (int i = 0; i + 1 < tensor.rank; ++i) {
    divides = divides && (tensor.shape[i] <= 1 || tensor.stride[i] % count == 0);
  }
  return divides;
}

template <class T>
void launch_for(const QuantizeFp8& args, const Parameters& parameters, cudaStream_t stream) {
  constexpr int kAtOnce = 4;
  const bool in_groups = has_groups(args.x, kAtOnce) && has_groups(args.values, kAtOnce);
  launch(in_groups ? quantize_kernel<T, kAtOnce> : quantize_kernel<T, 1>,
         {.blocks = blocks_for(parameters.tokens * parameters.heads, kWarps),
          .threads = kThreads,
          .stream = stream},
         parameters);
}

void run(const QuantizeFp8& args, const Execution& execution) {
  const DeviceGuard guard(args.x.device);
  const bool has_heads = args.x.rank == 3;
  const Parameters parameters{.x = args.x.data,
                              .values = data_of<__nv_fp8_storage_t>(args.values),
                              .scale = data_of<float>(args.scale),
                              .x_token_stride = args.x.stride[0],
                              .x_head_stride = has_heads ? args.x.stride[1] : 0,
                              .values_token_stride = args.values.stride[0],
                              .values_head_stride = has_heads ? args.values.stride[1] : 0,
                              .scale_token_stride = args.scale.stride[0],
                              .tokens = args.x.shape[0],
                              .heads = has_heads ? args.x.shape[1] : 1,
                              .dim = args.x.shape[args.x.rank - 1],
                              .power_of_two = args.power_of_two};
  if (args.x.dtype == DType::bf16) {
    launch_for<__nv_bfloat16>(args, parameters, execution.stream);
  } else if (args.x.dtype == DType::f16) {
    launch_for<__half>(args, parameters, execution.stream);
  } else {
    launch_for<float>(args, parameters, execution.stream);
  }
}

}  // namespace

Kernels<QuantizeFp8> kernels(std::type_identity<QuantizeFp8>) {
  static constexpr Kernel<QuantizeFp8> kKernels[] = {{"general", always_able, no_workspace, run}};
  return kKernels;
}

}  // namespace winnow::cuda
