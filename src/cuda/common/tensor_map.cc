// SPDX-License-Identifier: Apache-2.0
#include "cuda/common/tensor_map.h"

#include <fmt/format.h>

#include "cuda/common/runtime.h"
#include "winnow/error.h"

namespace winnow::cuda {
namespace {

constexpr std::int64_t kMaxStrideBytes = std::int64_t{1} << 39;

using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                            const cuuint64_t*, const cuuint32_t*, const cuuint32_t*,
                            CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                            CUtensorMapFloatOOBfill);

/// Finds the driver's function at run time, since the library does not link against the driver.
Encode find_encode() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  constexpr unsigned kSince = 12000;  // CUDA 12.0
  cuda_check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, kSince,
                                              cudaEnableDefault, &found));
  if (found != cudaDriverEntryPointSuccess) {
    throw Error(ErrorCode::device, "CUDA: the driver has no cuTensorMapEncodeTiled");
  }
  return reinterpret_cast<Encode>(function);
}

CUtensorMapDataType data_type(DType dtype) {
  switch (dtype) {
    case DType::bf16:
      return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    case DType::f16:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    case DType::f32:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
    default:
      return CU_TENSOR_MAP_DATA_TYPE_UINT8;
  }
}

}  // namespace

bool can_have_tensor_map(const Tensor& tensor) {
  if (!has_aligned_rows(tensor)) return false;
  for (int i = 0; i < tensor.rank; ++i) {
    if (tensor.shape[i] == 0) return false;
    const std::int64_t bytes = tensor.stride[i] * element_bytes(tensor.dtype);
    if (tensor.shape[i] > 1 && (bytes <= 0 || bytes > kMaxStrideBytes)) return false;
  }
  return true;
}

CUtensorMap make_tensor_map(const Tensor& tensor, const std::array<std::uint32_t, 4>& box) {
  static const Encode encode = find_encode();
  // The driver's function needs a context. A thread of the host that has called nothing else has
  // none until it sets a device.
  int device = 0;
  cuda_check(cudaGetDevice(&device));
  cuda_check(cudaSetDevice(device));
  // TMA counts dimensions from the last one.
  std::array<cuuint64_t, 4> sizes{};
  std::array<cuuint64_t, 3> strides{};
  std::array<cuuint32_t, 4> boxes{};
  constexpr std::array<cuuint32_t, 4> kSteps = {1, 1, 1, 1};
  const int rank = tensor.rank;
  cuuint64_t any_stride = 16;  // any legal stride does where a dimension has one element
  for (int i = 0; i < rank; ++i) {
    const int dim = rank - 1 - i;
    sizes[i] = static_cast<cuuint64_t>(tensor.shape[dim]);
    boxes[i] = box[dim];
    if (i == 0) continue;
    if (tensor.shape[dim] > 1) {
      any_stride = static_cast<cuuint64_t>(tensor.stride[dim] * element_bytes(tensor.dtype));
    }
    strides[i - 1] = any_stride;
  }
  CUtensorMap map{};
  const CUresult result =
      encode(&map, data_type(tensor.dtype), static_cast<cuuint32_t>(rank), tensor.data,
             sizes.data(), strides.data(), boxes.data(), kSteps.data(),
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    throw Error(ErrorCode::device,
                fmt::format("CUDA: cuTensorMapEncodeTiled failed ({})", static_cast<int>(result)));
  }
  return map;
}

}  // namespace winnow::cuda
