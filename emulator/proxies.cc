// SPDX-License-Identifier: Apache-2.0
// Reports of accesses of shared memory that need a proxy fence between them.
#include "emulator/proxies.h"

#include <algorithm>
#include <string>

namespace winnow::emulator {
namespace {

/// Calls f with what is noted of each piece of a part of shared memory.
template <class F>
void for_accesses(Block& block, std::vector<Access> Block::*kind, const std::byte* at,
                  std::size_t bytes, F f) {
  for (std::size_t offset = 0; offset < bytes; offset += kAccessBytes) {
    Access* const access = block.access_of(kind, at + offset);
    if (access != nullptr && access->warp != nullptr) f(*access);
  }
}

[[noreturn]] void fail(const Warp& warp, int lane, const std::string& what, const Access& access) {
  warp.fail(what + " in line " + std::to_string(access.instruction->line) + " by block " +
                std::to_string(access.warp->block.index[0]) + ", warp " +
                std::to_string(access.warp->index) + ", without a proxy fence since (" +
                std::string(access.instruction->text.substr(0, 100)) + ")",
            lane);
}

}  // namespace

void check_reads_finished(const Warp& copying, int lane, Block& block, const std::byte* at,
                          std::size_t bytes) {
  for_accesses(block, &Block::reads, at, bytes, [&](const Access& read) {
    if (!read.is_finished()) fail(copying, lane, "TMA writes what was read", read);
  });
}

void check_writes_fenced(const Warp& reading, int lane, const std::byte* at, std::size_t bytes) {
  for_accesses(reading.block, &Block::writes, at, bytes, [&](Access& write) {
    if (std::max(write.warp->fenced_at, reading.fenced_at) <= write.time) {
      fail(reading, lane, "TMA or wgmma reads what was written", write);
    }
    write = {};
  });
}

void forget_writes(Block& block, const std::byte* at, std::size_t bytes) {
  for_accesses(block, &Block::writes, at, bytes, [](Access& write) { write = {}; });
}

}  // namespace winnow::emulator
