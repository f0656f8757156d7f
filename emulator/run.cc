// SPDX-License-Identifier: Apache-2.0
// How a grid runs: as many blocks as are resident, their warps in random turns, each for a random
// number of instructions; copies happen in between, and at times a warp pauses. The same seed gives
// the same turns.
#include <algorithm>
#include <cstdlib>

#include "emulator/model.h"
#include "emulator/warp.h"

namespace winnow::emulator {
namespace {

constexpr unsigned kMostBlocks = 2;     // of a multiprocessor, fewer than on a GPU to save memory
constexpr int kMostInstructions = 256;  // of a turn

std::uint64_t seed() {
  const char* const text = std::getenv("WINNOW_EMULATOR_SEED");
  return text == nullptr ? 1 : std::strtoull(text, nullptr, 10);
}

unsigned product(const std::array<unsigned, 3>& size) { return size[0] * size[1] * size[2]; }

}  // namespace

Block::Block(GridRun& grid, std::array<unsigned, 3> index, unsigned rank)
    : grid(grid), index(index), rank(rank) {
  const FunctionInfo& info = grid.function.info;
  shared_bytes = info.static_shared_bytes + grid.grid.dynamic_shared_bytes;
  constexpr std::size_t kAlignment = 1024;
  shared_storage_ = std::make_unique<std::byte[]>(shared_bytes + kAlignment);
  const auto address = reinterpret_cast<std::uintptr_t>(shared_storage_.get());
  shared = shared_storage_.get() + (kAlignment - address % kAlignment) % kAlignment;
  constexpr int kNoNumber = 0xff;
  std::memset(shared, kNoNumber, shared_bytes);
  reads.resize((shared_bytes + kAccessBytes - 1) / kAccessBytes);
  writes.resize(reads.size());
  const unsigned threads = product(grid.grid.threads);
  for (unsigned first = 0; first < threads; first += kLanes) {
    warps.push_back(std::make_unique<Warp>(*this, static_cast<int>(first / kLanes)));
  }
}

bool Block::ended() const {
  return std::all_of(warps.begin(), warps.end(), [](const auto& warp) { return warp->ended(); });
}

Access* Block::far_access_of(std::vector<Access> Block::*kind, const std::byte* at) const {
  for (Block* const block : cluster) {
    const auto offset = static_cast<std::size_t>(at - block->shared);
    if (offset < block->shared_bytes) return &(block->*kind)[offset / kAccessBytes];
  }
  return nullptr;
}

GridRun::GridRun(Gpu& gpu, const Function& function, const Grid& grid, const std::byte* parameters)
    : gpu(gpu), function(function), grid(grid), parameters(parameters) {
  random_state_ = seed() * 0x9e3779b97f4a7c15u + 1;
}

std::uint32_t GridRun::random(std::uint32_t below) {
  random_state_ ^= random_state_ << 13;
  random_state_ ^= random_state_ >> 7;
  random_state_ ^= random_state_ << 17;
  return static_cast<std::uint32_t>((random_state_ >> 32) % below);
}

void GridRun::complete(std::size_t copy) {
  const std::function<void()> completes = std::move(bulk_copies[copy].complete);
  bulk_copies.erase(bulk_copies.begin() + static_cast<std::ptrdiff_t>(copy));
  completes();
}

void GridRun::start_cluster() {
  const unsigned size = product(grid.cluster);
  std::vector<Block*> members;
  for (unsigned rank = 0; rank < size; ++rank) {
    const std::uint64_t linear = next_ * size + rank;
    const std::array<unsigned, 3> index = {
        static_cast<unsigned>(linear % grid.blocks[0]),
        static_cast<unsigned>(linear / grid.blocks[0] % grid.blocks[1]),
        static_cast<unsigned>(linear / grid.blocks[0] / grid.blocks[1])};
    resident_.push_back(std::make_unique<Block>(*this, index, rank));
    members.push_back(resident_.back().get());
  }
  for (Block* const block : members) {
    block->cluster = members;
    for (const auto& warp : block->warps) warps_.push_back(warp.get());
  }
  ++next_;
}

void GridRun::take_turn(Warp& warp) {
  constexpr std::uint32_t kChance = 4;  // one of so many turns completes a copy
  // As a warp whose loads queue: no other may count on its pace. All at rest, none pauses.
  constexpr std::uint32_t kPauseChance = 400;     // after one of so many turns it pauses for long
  const std::uint64_t rest = 16 * warps_.size();  // idle turns after which all wait
  const bool pauses = warp.paused_until > turns_ && idle_turns_ <= rest;
  const bool ran = !pauses && warp.run(1 + static_cast<int>(random(kMostInstructions)));
  if (random(kPauseChance) == 0) warp.paused_until = random_due();
  idle_turns_ = ran ? 0 : idle_turns_ + 1;
  ++turns_;
  const bool all_wait = idle_turns_ > rest;
  const auto may_end = [&](std::uint64_t due) {
    return all_wait || (due <= turns_ && random(kChance) == 0);
  };
  if (!bulk_copies.empty()) {
    const std::size_t copy = random(static_cast<std::uint32_t>(bulk_copies.size()));
    if (may_end(bulk_copies[copy].due)) {
      complete(copy);
      idle_turns_ = 0;
    }
  }
  if (!warp.copies.empty() && may_end(warp.copies.front().due)) {
    warp.land_first();
    idle_turns_ = 0;
  }
  if (idle_turns_ > 10000 && idle_turns_ > 400 * warps_.size()) {
    std::string where;
    for (const Warp* const each : warps_) where += each->where();
    throw KernelError(function.name + ": nothing goes on:" + where);
  }
}

void GridRun::retire(std::size_t chosen) {
  Warp& warp = *warps_[chosen];
  while (!warp.copies.empty()) warp.land_first();
  if (std::any_of(bulk_copies.begin(), bulk_copies.end(),
                  [&](const BulkCopy& copy) { return copy.warp == &warp; })) {
    warp.fail("a warp ends before TMA has read what it stores");
  }
  warps_.erase(warps_.begin() + static_cast<std::ptrdiff_t>(chosen));
  const std::vector<Block*> members = warp.block.cluster;
  if (!std::all_of(members.begin(), members.end(), [](auto* each) { return each->ended(); }))
    return;
  while (!bulk_copies.empty()) complete(0);  // those of this cluster need its memory
  std::erase_if(resident_, [&](const auto& block) {
    return std::find(members.begin(), members.end(), block.get()) != members.end();
  });
}

void GridRun::run() {
  const unsigned cluster = product(grid.cluster);
  const std::uint64_t clusters =
      std::uint64_t{grid.blocks[0]} * grid.blocks[1] * grid.blocks[2] / cluster;
  const std::size_t shared =
      function.info.static_shared_bytes + grid.dynamic_shared_bytes + kSharedBegin;
  const unsigned by_threads =
      std::max(static_cast<unsigned>(model().resident_threads) / product(grid.threads), 1u);
  const auto by_memory = static_cast<unsigned>(
      std::max<std::size_t>((model().shared_bytes + kSharedBegin) / shared, 1));
  const unsigned resident = Gpu::kMultiprocessors * std::min({by_threads, by_memory, kMostBlocks});
  while (true) {
    while (next_ < clusters && (resident_.empty() || resident_.size() + cluster <= resident)) {
      start_cluster();
    }
    if (warps_.empty()) return;
    const std::size_t chosen = random(static_cast<std::uint32_t>(warps_.size()));
    take_turn(*warps_[chosen]);
    if (warps_[chosen]->ended()) retire(chosen);
  }
}

Gpu& Gpu::instance() {
  static auto* const gpu = new Gpu;  // for ever: kernels' owners may end after it
  return *gpu;
}

void Gpu::run(const Function& function, const Grid& grid, const std::byte* parameters) {
  GridRun(*this, function, grid, parameters).run();
}

}  // namespace winnow::emulator
