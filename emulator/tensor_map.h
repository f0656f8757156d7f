// SPDX-License-Identifier: Apache-2.0
// Tensor maps as this emulator encodes them into the 128 bytes of a CUtensorMap.
#pragma once

#include <array>
#include <cstdint>

#include <cuda.h>

namespace winnow::emulator {

/// Dimension 0 is the one along which elements are neighbours.
struct TensorMap {
  static constexpr std::uint64_t kMagic = 0x70616d2d726f736e;  // any other number: not a map
  static constexpr int kMostDimensions = 5;

  std::uint64_t magic = kMagic;
  std::uint64_t address = 0;                                  // a multiple of 16
  std::array<std::uint64_t, kMostDimensions> sizes{};         // elements; 1 beyond the rank
  std::array<std::uint64_t, kMostDimensions> stride_bytes{};  // [0] is that of an element
  std::array<std::uint32_t, kMostDimensions> box{};           // elements; 1 beyond the rank
  std::uint8_t rank = 0;
  std::uint8_t element_bytes = 0;
  std::uint8_t type = 0;     // a CUtensorMapDataType
  std::uint8_t swizzle = 0;  // CU_TENSOR_MAP_SWIZZLE_NONE or _128B
};
static_assert(sizeof(TensorMap) <= sizeof(CUtensorMap));

}  // namespace winnow::emulator
