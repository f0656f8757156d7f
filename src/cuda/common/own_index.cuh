// SPDX-License-Identifier: Apache-2.0
// The numbers of the calling thread and thread block, read anew. The compiler keeps what follows
// from threadIdx and blockIdx in registers from a kernel's begin on; what follows from these is
// computed where it is used, and takes none before. Where registers are short, the others would be
// spilled.
#pragma once

namespace winnow::cuda {

__device__ inline unsigned own_thread() {
  unsigned thread = 0;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

__device__ inline int own_block() {
  int block = 0;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
  return block;
}

}  // namespace winnow::cuda
