// SPDX-License-Identifier: Apache-2.0
// Copies of boxes of a tensor into shared memory by the copy engine; they arrive at a barrier.
#pragma once

#include <cstdint>

#include <cuda.h>

#include "cuda/hopper/barrier.cuh"

namespace winnow::hopper {

/// Has the map read before the first copy needs it.
__device__ inline void prefetch(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

/// From element (column, row) on.
__device__ inline void copy_box(void* shared, const CUtensorMap& map, Barrier& barrier, int column,
                                int row) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, "
      "%3}], [%4];" ::"r"(shared_address(shared)),
      "l"(&map), "r"(column), "r"(row), "r"(shared_address(&barrier))
      : "memory");
}
/// From element (column, row, plane) on.
__device__ inline void copy_box(void* shared, const CUtensorMap& map, Barrier& barrier, int column,
                                int row, int plane) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, "
      "%3, %4}], [%5];" ::"r"(shared_address(shared)),
      "l"(&map), "r"(column), "r"(row), "r"(plane), "r"(shared_address(&barrier))
      : "memory");
}

/// From element (column, row, plane, volume) on.
__device__ inline void copy_box(void* shared, const CUtensorMap& map, Barrier& barrier, int column,
                                int row, int plane, int volume) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, "
      "%3, %4, %5}], [%6];" ::"r"(shared_address(shared)),
      "l"(&map), "r"(column), "r"(row), "r"(plane), "r"(volume), "r"(shared_address(&barrier))
      : "memory");
}

}  // namespace winnow::hopper
