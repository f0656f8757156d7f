// SPDX-License-Identifier: Apache-2.0
// The driver's function that encodes tensor maps, and how it is found.
#include <algorithm>
#include <cstring>
#include <string_view>

#include <cuda.h>

#include "emulator/runtime/errors.h"
#include "emulator/tensor_map.h"

namespace winnow::emulator {
namespace {

constexpr std::uint64_t kRowBytes = 16;  // addresses, strides and boxes are multiples of it

/// 0 for a type that is unknown here.
std::uint8_t bytes_of(CUtensorMapDataType type) {
  switch (type) {
    case CU_TENSOR_MAP_DATA_TYPE_UINT8:
      return 1;
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT16:
    case CU_TENSOR_MAP_DATA_TYPE_BFLOAT16:
      return 2;
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT32:
      return 4;
    default:
      return 0;
  }
}

/// What the driver refuses.
bool is_legal(const TensorMap& map) {
  constexpr std::uint64_t kMostElements = std::uint64_t{1} << 32, kMostStride = kMostElements << 8;
  constexpr std::uint32_t kMostOfBox = 256;
  constexpr std::uint64_t kSwizzled = 128;  // bytes
  if (map.address == 0 || map.address % kRowBytes != 0) return false;
  for (std::size_t i = 0; i < map.rank; ++i) {
    if (map.sizes[i] == 0 || map.sizes[i] > kMostElements) return false;
    if (map.box[i] == 0 || map.box[i] > kMostOfBox) return false;
    if (i == 0) continue;
    if (map.stride_bytes[i] % kRowBytes != 0 || map.stride_bytes[i] >= kMostStride) return false;
  }
  const std::uint64_t row = std::uint64_t{map.box[0]} * map.element_bytes;
  return row % kRowBytes == 0 && (map.swizzle == CU_TENSOR_MAP_SWIZZLE_NONE || row <= kSwizzled);
}

CUresult encode(CUtensorMap* encoded, CUtensorMapDataType type, cuuint32_t rank, void* address,
                const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                const cuuint32_t* steps, CUtensorMapInterleave interleave,
                CUtensorMapSwizzle swizzle, CUtensorMapL2promotion /*promotion*/,
                CUtensorMapFloatOOBfill fill) {
  constexpr std::uintptr_t kAlignment = 64;
  if (encoded == nullptr || reinterpret_cast<std::uintptr_t>(encoded) % kAlignment != 0 ||
      rank < 1 || rank > TensorMap::kMostDimensions || sizes == nullptr ||
      (strides == nullptr && rank > 1) || box == nullptr || steps == nullptr)
    return CUDA_ERROR_INVALID_VALUE;
  TensorMap map;
  map.address = reinterpret_cast<std::uint64_t>(address);
  map.rank = static_cast<std::uint8_t>(rank);
  map.element_bytes = bytes_of(type);
  map.type = static_cast<std::uint8_t>(type);
  map.swizzle = static_cast<std::uint8_t>(swizzle);
  map.sizes.fill(1);
  map.box.fill(1);
  std::copy_n(sizes, rank, map.sizes.begin());
  std::copy_n(box, rank, map.box.begin());
  map.stride_bytes[0] = map.element_bytes;
  std::copy_n(strides, rank - 1, map.stride_bytes.begin() + 1);
  const bool known =
      map.element_bytes > 0 && interleave == CU_TENSOR_MAP_INTERLEAVE_NONE &&
      (swizzle == CU_TENSOR_MAP_SWIZZLE_NONE || swizzle == CU_TENSOR_MAP_SWIZZLE_128B) &&
      fill == CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE &&
      std::all_of(steps, steps + rank, [](cuuint32_t step) { return step == 1; });
  if (!known) return CUDA_ERROR_NOT_SUPPORTED;
  if (!is_legal(map)) return CUDA_ERROR_INVALID_VALUE;
  *encoded = {};
  std::memcpy(encoded, &map, sizeof(map));
  return CUDA_SUCCESS;
}

}  // namespace
}  // namespace winnow::emulator

using namespace winnow::emulator;

cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function,
                                             unsigned /*version*/, unsigned long long /*flags*/,
                                             cudaDriverEntryPointQueryResult* result) {
  return call([&] {
    require(symbol != nullptr && function != nullptr);
    const bool found = std::string_view(symbol) == "cuTensorMapEncodeTiled";
    *function = found ? reinterpret_cast<void*>(&encode) : nullptr;
    if (result != nullptr)
      *result = found ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    require(found || result != nullptr, cudaErrorSymbolNotFound);
  });
}
