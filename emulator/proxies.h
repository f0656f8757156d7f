// SPDX-License-Identifier: Apache-2.0
// Shared memory between the two proxies. TMA and wgmma do not wait for ordinary loads and stores,
// not even for those before an arrival at an mbarrier, unless a proxy fence (fence.proxy.async)
// follows them. So ordinary accesses are noted, and looked up when TMA or wgmma come to the same
// bytes.
#pragma once

#include "emulator/warp.h"

namespace winnow::emulator {

/// Notes an ordinary load of at most 16 aligned bytes; of memory that is not shared, nothing.
inline void note_read(const Warp& warp, const Instruction& i, const std::byte* at) {
  Access* const last = warp.block.access_of(&Block::reads, at);
  // Another warp's load that may be under way stays: this one does not finish it.
  if (last == nullptr || (last->warp != &warp && !last->is_finished())) return;
  *last = {&warp, &i, warp.block.grid.clock};
}

/// The same of a store.
inline void note_write(const Warp& warp, const Instruction& i, const std::byte* at) {
  Access* const last = warp.block.access_of(&Block::writes, at);
  if (last != nullptr) *last = {&warp, &i, warp.block.grid.clock};
}

/// Fails if loads of what TMA writes may be under way: if their warps have executed neither a proxy
/// fence nor a barrier since.
void check_reads_finished(const Warp& copying, int lane, Block& block, const std::byte* at,
                          std::size_t bytes);

/// Fails if TMA or wgmma read what was written without a proxy fence of the writer or the reader
/// since. What one reader may read others may: they wait for it if they have no fence of their own.
void check_writes_fenced(const Warp& reading, int lane, const std::byte* at, std::size_t bytes);

/// Forgets the writes of what TMA overwrites.
void forget_writes(Block& block, const std::byte* at, std::size_t bytes);

}  // namespace winnow::emulator
