// SPDX-License-Identifier: Apache-2.0
// TMA: copies of boxes of a tensor into shared memory, which complete at an mbarrier.
#pragma once

#include <cstdint>

#include <cuda.h>

#include "cuda/hopper/barrier.cuh"

namespace winnow::hopper {

/// Prefetches a tensor map, so that the first copy does not wait for it.
__device__ inline void prefetch(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

/// Copies the box that begins at element (column, row).
__device__ inline void copy_box(void* shared, const CUtensorMap& map, Barrier& barrier, int column,
                                int row) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, "
      "%3}], [%4];" ::"r"(shared_address(shared)),
      "l"(&map), "r"(column), "r"(row), "r"(shared_address(&barrier))
      : "memory");
}
/// Copies the box that begins at element (column, row, plane).
__device__ inline void copy_box(void* shared, const CUtensorMap& map, Barrier& barrier, int column,
                                int row, int plane) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, "
      "%3, %4}], [%5];" ::"r"(shared_address(shared)),
      "l"(&map), "r"(column), "r"(row), "r"(plane), "r"(shared_address(&barrier))
      : "memory");
}

/// Prefetches such a box into L2.
__device__ inline void prefetch_box(const CUtensorMap& map, int column, int row, int plane) {
  asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global [%0, {%1, %2, %3}];" ::"l"(&map),
               "r"(column), "r"(row), "r"(plane)
               : "memory");
}

/// Copies the box that begins at element (column, row, plane, volume).
__device__ inline void copy_box(void* shared, const CUtensorMap& map, Barrier& barrier, int column,
                                int row, int plane, int volume) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, "
      "%3, %4, %5}], [%6];" ::"r"(shared_address(shared)),
      "l"(&map), "r"(column), "r"(row), "r"(plane), "r"(volume), "r"(shared_address(&barrier))
      : "memory");
}

}  // namespace winnow::hopper
