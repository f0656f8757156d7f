// SPDX-License-Identifier: Apache-2.0
// d_w_v from its parts, the sums over ranges of tokens, on sm_90.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/common/mma.cuh"

namespace winnow::cuda::value_projection::sm90 {

inline constexpr int kPartThreads = 256;
inline constexpr int kPartColumns = 4;  // of a thread

/// The parts of d_w_v, [parts, heads, rows, columns], dense, and d_w_v with its strides.
struct Parts {
  const float* data;
  int count;
  std::int64_t heads, rows, columns;
  void* d_w;
  std::int64_t head_stride, row_stride;

  __host__ __device__ std::int64_t elements() const { return heads * rows * columns; }
};

/// Sums the parts in their order and adds them to d_w_v if that is f32, else overwrites it.
template <class Out>
__global__ void __launch_bounds__(kPartThreads)
    sum_parts_kernel(const __grid_constant__ Parts parts) {
  const std::int64_t elements = parts.elements();
  const std::int64_t first = (std::int64_t{blockIdx.x} * kPartThreads + threadIdx.x) * kPartColumns;
  for (std::int64_t i = first; i < elements;
       i += std::int64_t{gridDim.x} * kPartThreads * kPartColumns) {
    float4 sum = *reinterpret_cast<const float4*>(parts.data + i);
    for (int part = 1; part < parts.count; ++part) {
      const float4 term = *reinterpret_cast<const float4*>(parts.data + part * elements + i);
      sum = {sum.x + term.x, sum.y + term.y, sum.z + term.z, sum.w + term.w};
    }
    const std::int64_t row = i / parts.columns;
    Out* const to = static_cast<Out*>(parts.d_w) + row / parts.rows * parts.head_stride +
                    row % parts.rows * parts.row_stride + i % parts.columns;
    if constexpr (std::is_same_v<Out, float>) {
      float4& d_w = *reinterpret_cast<float4*>(to);
      d_w = {d_w.x + sum.x, d_w.y + sum.y, d_w.z + sum.z, d_w.w + sum.w};
    } else {
      *reinterpret_cast<uint2*>(to) = {pack<Out>(sum.x, sum.y), pack<Out>(sum.z, sum.w)};
    }
  }
}

}  // namespace winnow::cuda::value_projection::sm90
