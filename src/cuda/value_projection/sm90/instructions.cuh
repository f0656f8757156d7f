// SPDX-License-Identifier: Apache-2.0
// Instructions of Hopper that the products of value_projection use beside those of cuda/hopper: TMA
// from shared memory to a tensor, and what the two thread blocks of a cluster share.
#pragma once

#include <cstdint>

#include <cuda.h>

#include "cuda/hopper/barrier.cuh"

namespace winnow::cuda::value_projection::sm90 {

using namespace winnow::hopper;

/// Starts a copy from shared memory to the box that begins at element (column, row, plane). What
/// lies outside of the tensor is not written. Writes to shared memory need a proxy fence before.
__device__ inline void store_box(const CUtensorMap& map, const void* shared, int column, int row,
                                 int plane) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%1, %2, %3}], [%4];\n"
      "cp.async.bulk.commit_group;" ::"l"(&map),
      "r"(column), "r"(row), "r"(plane), "r"(shared_address(shared))
      : "memory");
}

/// Starts the additions of f32 elements in shared memory to those of a box, likewise.
__device__ inline void add_box(const CUtensorMap& map, const void* shared, int column, int row,
                               int plane) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.tile.bulk_group [%0, {%1, %2, %3}], "
      "[%4];\n"
      "cp.async.bulk.commit_group;" ::"l"(&map),
      "r"(column), "r"(row), "r"(plane), "r"(shared_address(shared))
      : "memory");
}

/// Waits until TMA has read the shared memory of all but the last kPending boxes that this thread
/// stores.
template <int kPending>
__device__ inline void wait_for_stores() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

/// The number of this thread block in its cluster.
__device__ inline int block_rank() {
  std::uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
}

/// Waits for all threads of the cluster.
__device__ inline void sync_cluster() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" ::
          : "memory");
}

/// Arrives at the barrier that stands at the same place in block `rank` of the cluster.
__device__ inline void arrive_at_block(Barrier& barrier, int rank) {
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
      "}\n" ::"r"(shared_address(&barrier.state)),
      "r"(rank)
      : "memory");
}

/// Copies the box that begins at element (column, row, plane) to the same place in every block of
/// `blocks`, a bit each, and completes at the barrier of each.
__device__ inline void copy_box_to_blocks(void* shared, const CUtensorMap& map, Barrier& barrier,
                                          int column, int row, int plane, std::uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::"
      "cluster [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(shared_address(shared)),
      "l"(&map), "r"(column), "r"(row), "r"(plane), "r"(shared_address(&barrier.state)), "h"(blocks)
      : "memory");
}

}  // namespace winnow::cuda::value_projection::sm90
