// SPDX-License-Identifier: Apache-2.0
// How a grid runs: as many blocks as are resident, their warps in random turns, each for a random
// number of instructions; copies happen in between. The same seed gives the same turns.
#include <algorithm>
#include <cstdlib>

#include "emulator/warp.h"

namespace winnow::emulator {
namespace {

constexpr unsigned kMostThreads = 2048;  // of a multiprocessor
constexpr unsigned kMostBlocks = 2;      // of a multiprocessor, fewer than on a GPU to save memory
constexpr int kMostInstructions = 256;   // of a turn

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
  const unsigned threads = product(grid.grid.threads);
  for (unsigned first = 0; first < threads; first += kLanes) {
    warps.push_back(std::make_unique<Warp>(*this, static_cast<int>(first / kLanes)));
  }
}

bool Block::ended() const {
  return std::all_of(warps.begin(), warps.end(), [](const auto& warp) { return warp->ended(); });
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

void GridRun::happen(std::size_t event) {
  const std::function<void()> happens = std::move(events[event].happen);
  events.erase(events.begin() + static_cast<std::ptrdiff_t>(event));
  happens();
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
  for (Block* const block : members) block->cluster = members;
  ++next_;
}

void GridRun::run() {
  const unsigned cluster = product(grid.cluster);
  const std::uint64_t clusters =
      std::uint64_t{grid.blocks[0]} * grid.blocks[1] * grid.blocks[2] / cluster;
  const std::size_t shared =
      function.info.static_shared_bytes + grid.dynamic_shared_bytes + kSharedBegin;
  const unsigned by_threads = std::max(kMostThreads / product(grid.threads), 1u);
  const auto by_memory =
      static_cast<unsigned>(std::max<std::size_t>((Gpu::kSharedBytes + kSharedBegin) / shared, 1));
  const unsigned resident = Gpu::kMultiprocessors * std::min({by_threads, by_memory, kMostBlocks});
  std::vector<Warp*> warps;
  std::size_t idle = 0;  // turns without progress
  while (true) {
    bool changed = false;
    while (next_ < clusters && (resident_.empty() || resident_.size() + cluster <= resident)) {
      start_cluster();
      changed = true;
    }
    if (resident_.empty()) break;
    if (changed || warps.empty()) {
      warps.clear();
      for (const auto& block : resident_) {
        for (const auto& warp : block->warps) {
          if (!warp->ended()) warps.push_back(warp.get());
        }
      }
    }
    const std::size_t chosen = random(static_cast<std::uint32_t>(warps.size()));
    Warp& warp = *warps[chosen];
    const bool ran = warp.run(1 + static_cast<int>(random(kMostInstructions)));
    idle = ran ? 0 : idle + 1;
    const bool all_idle = idle > 16 * warps.size();
    if (!events.empty() && (all_idle || random(4) == 0)) {
      happen(random(static_cast<std::uint32_t>(events.size())));
      idle = 0;
    }
    if (!warp.copies.empty() && (all_idle || random(4) == 0 || warp.ended())) {
      do {
        warp.land_first();
      } while (warp.ended() && !warp.copies.empty());
      idle = 0;
    }
    if (idle > 10000 && idle > 400 * warps.size()) {
      std::string where;
      for (const Warp* const each : warps) where += each->where();
      throw KernelError(function.name + ": nothing goes on:" + where);
    }
    if (warp.ended()) {
      if (std::any_of(events.begin(), events.end(),
                      [&](const Event& event) { return event.warp == &warp; })) {
        warp.fail("a warp ends before TMA has read what it stores");
      }
      warps.erase(warps.begin() + static_cast<std::ptrdiff_t>(chosen));
      if (warp.block.ended()) {
        // What others of its cluster, or copies, still do in its memory comes first.
        const std::vector<Block*> members = warp.block.cluster;
        if (std::all_of(members.begin(), members.end(), [](auto* b) { return b->ended(); })) {
          while (!events.empty()) happen(0);
          std::erase_if(resident_, [&](const auto& block) {
            return std::find(members.begin(), members.end(), block.get()) != members.end();
          });
          warps.clear();
        }
      }
    }
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
