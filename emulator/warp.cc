// SPDX-License-Identifier: Apache-2.0
// How a warp runs: groups of lanes at the same instruction, one group at a time.
#include "emulator/warp.h"

#include <algorithm>
#include <cstdio>

namespace winnow::emulator {

Warp::Warp(Block& block, int index) : block(block), index(index) {
  const Function& function = block.grid.function;
  std::vector<std::vector<std::byte>>& free = block.grid.free_registers;
  if (!free.empty()) {
    registers = std::move(free.back());
    free.pop_back();
  }
  registers.resize(function.register_bytes);
  predicates.resize(function.predicates);
  call_memory.resize(function.call_bytes * kLanes);
  const Grid& grid = block.grid.grid;
  const unsigned threads = grid.threads[0] * grid.threads[1] * grid.threads[2];
  const unsigned lanes = std::min(threads - static_cast<unsigned>(index) * kLanes, 32u);
  live = lanes == 32 ? kAllLanes : (LaneMask{1} << lanes) - 1;
}

Warp::~Warp() { block.grid.free_registers.push_back(std::move(registers)); }

void Warp::rest(LaneMask waiting) {
  if (waiting == (live & ~stuck_)) rests_until_ = block.grid.mbarrier_changes;
}

bool Warp::pick_group(std::uint32_t& place, LaneMask& mask) const {
  const LaneMask free = live & ~stuck_;
  if (free == 0) return false;
  // Lanes that are behind come first, so that lanes meet again. Where they may wait for others of
  // the warp, any group may be next.
  const int first = first_lane(free);
  place = pc[first];
  if (prefer_others_) {
    int skip = static_cast<int>(block.grid.random(static_cast<std::uint32_t>(std::popcount(free))));
    for_lanes(free, [&](int lane) {
      if (skip-- == 0) place = pc[lane];
    });
  } else {
    for_lanes(free, [&](int lane) { place = std::min(place, pc[lane]); });
  }
  mask = 0;
  for_lanes(live, [&](int lane) {
    if (pc[lane] == place) mask |= LaneMask{1} << lane;
  });
  return true;
}

LaneMask Warp::pick_complete(const Operand& names, LaneMask active) const {
  while (active != 0) {
    const auto named = read<std::uint32_t>(names, first_lane(active));
    LaneMask together = 0;
    for_lanes(active, [&](int lane) {
      if (read<std::uint32_t>(names, lane) == named) together |= LaneMask{1} << lane;
    });
    if ((together & ~named) != 0) {
      fail("a lane is not among those that it names", first_lane(together & ~named));
    }
    if ((live & named & ~together) == 0) return together;
    active &= ~together;
  }
  return 0;
}

bool Warp::run(int most) {
  const std::vector<Instruction>& code = block.grid.function.code;
  if (rests_until_ == block.grid.mbarrier_changes) return false;
  bool ran = false;
  while (most > 0 && live != 0) {
    std::uint32_t place = 0;
    LaneMask mask = 0;
    if (!pick_group(place, mask)) {
      fail("lanes wait for each other at different instructions: " + where());
    }
    prefer_others_ = false;
    // The group goes on until it comes to where others stand.
    std::uint32_t meeting = ~0u;
    for_lanes(live & ~mask, [&](int lane) {
      if (pc[lane] > place) meeting = std::min(meeting, pc[lane]);
    });
    const auto leave_at = [&](std::uint32_t at) {
      for_lanes(mask & live, [&](int lane) { pc[lane] = at; });
    };
    while (true) {
      const Instruction& i = code[place];
      current = &i;
      LaneMask active = mask;
      if (i.guard >= 0) {
        active &= predicates[i.guard] ^ (i.guard_negated ? kAllLanes : 0);
      }
      if (active == 0) {
        ++place;
      } else {
        if (i.is_aligned || i.has_lane_mask) {
          LaneMask required = live;
          LaneMask ready = active == live ? active : 0;
          if (i.has_lane_mask) {
            const Operand& names = i.operands[i.count - 1];
            required &= read<std::uint32_t>(names, first_lane(active));
            ready = pick_complete(names, active);
          }
          if (ready == 0) {
            if (i.guard >= 0 && (mask & required) == required) {
              fail("not all lanes execute an instruction that needs them all");
            }
            leave_at(place);
            stuck_ |= mask;
            break;
          }
          if (ready != active) {  // those that name other lanes stay behind
            leave_at(place);
            mask &= ~active | ready;
            active = ready;
          }
          stuck_ &= ~mask;
        }
        ++block.grid.clock;
        const LaneMask live_before = live;
        const Outcome outcome = i.execute(*this, i, active);
        if (outcome == Outcome::blocked) {
          leave_at(place);
          return ran;
        }
        ran = true;
        --most;
        ++place;
        if (outcome == Outcome::jumped) {
          for_lanes(mask & ~active, [&](int lane) { pc[lane] = place; });
          if (live != live_before) stuck_ = 0;  // others may have waited for those that ended
          // A branch of the whole group goes on without a new choice.
          const LaneMask left = mask & live;
          bool together = left != 0 && active == mask && most > 0 && live == mask;
          if (together) {
            place = pc[first_lane(left)];
            continue;
          }
          break;
        }
        if (outcome == Outcome::yield) {
          leave_at(place);
          prefer_others_ = true;
          return false;
        }
      }
      if (most <= 0 || place >= meeting) {
        leave_at(place);
        break;
      }
    }
  }
  return ran;
}

std::uint64_t Warp::address(const Operand& operand, int lane) const {
  switch (operand.kind) {
    case Operand::Kind::reg:
      if (operand.bytes == 4) {
        return read<std::uint32_t>(operand, lane) +
               static_cast<std::uint32_t>(operand.displacement);
      }
      return read<std::uint64_t>(operand, lane) + static_cast<std::uint64_t>(operand.displacement);
    case Operand::Kind::constant:
      return static_cast<std::uint64_t>(operand.value);
    case Operand::Kind::parameter:
      return reinterpret_cast<std::uint64_t>(block.grid.parameters) +
             static_cast<std::uint64_t>(operand.value + operand.displacement);
    case Operand::Kind::call_slot:
      return reinterpret_cast<std::uint64_t>(call_memory.data()) +
             static_cast<std::uint64_t>(lane) * block.grid.function.call_bytes +
             static_cast<std::uint64_t>(operand.value + operand.displacement);
    default:
      fail("an operand that is no address", lane);
  }
}

std::byte* Warp::far_shared(std::uint64_t address, std::size_t bytes, int lane) const {
  const std::uint64_t rank = address >> kRankBit;
  const Block* owner = &block;
  if (rank > 0 && rank <= block.cluster.size()) {
    owner = block.cluster[rank - 1];
    if (owner != &block && owner->ended()) fail("shared memory of a block that has ended", lane);
    address &= (std::uint64_t{1} << kRankBit) - 1;
  }
  const std::uint64_t offset = address - kSharedBegin;
  if (offset > owner->shared_bytes || bytes > owner->shared_bytes - offset) {
    fail("shared memory at " + std::to_string(static_cast<std::int64_t>(address) - kSharedBegin) +
             ", " + std::to_string(bytes) + " bytes, of " + std::to_string(owner->shared_bytes),
         lane);
  }
  return owner->shared + (address - kSharedBegin);
}

std::byte* Warp::other_memory(std::uint64_t address, std::size_t bytes, int lane) const {
  auto* const at = reinterpret_cast<std::byte*>(address);
  const auto holds = [&](const std::byte* begin, std::size_t size) {
    return at >= begin && at < begin + size && bytes <= static_cast<std::size_t>(begin + size - at);
  };
  if (holds(block.shared, block.shared_bytes) ||
      holds(block.grid.parameters, block.grid.function.info.all_parameter_bytes) ||
      holds(call_memory.data(), call_memory.size())) {
    return at;
  }
  const Memory::Range found = block.grid.gpu.memory.find(at);
  if (found.begin == nullptr || bytes > static_cast<std::size_t>(found.end - at)) {
    char text[160];
    if (found.begin != nullptr) {
      std::snprintf(text, sizeof text,
                    "device memory at %p, %zu bytes, %td into an allocation of %td",
                    static_cast<void*>(at), bytes, at - found.begin, found.end - found.begin);
    } else {
      std::snprintf(text, sizeof text, "device memory at %p, %zu bytes, in no allocation",
                    static_cast<void*>(at), bytes);
    }
    fail(text, lane);
  }
  block.grid.last_range = found;
  return at;
}

void Warp::fail_alignment(std::uint64_t address, std::size_t bytes, int lane) const {
  fail("an address, " + std::to_string(address) + ", that is not a multiple of " +
           std::to_string(bytes),
       lane);
}

std::string Warp::where() const {
  std::string text;
  LaneMask seen = 0;
  for_lanes(live, [&](int lane) {
    if ((seen >> lane) & 1) return;
    LaneMask mask = 0;
    for_lanes(live, [&](int other) {
      if (pc[other] == pc[lane]) mask |= LaneMask{1} << other;
    });
    seen |= mask;
    const Instruction& i = block.grid.function.code[pc[lane]];
    char head[64];
    std::snprintf(head, sizeof head, "\n  block %u, warp %d, lanes %08x, line %u: ", block.index[0],
                  index, mask, i.line);
    text += head + std::string(i.text.substr(0, 100));
  });
  return text;
}

void Warp::fail(const std::string& what, int lane) const {
  std::string text = block.grid.function.name + ": " + what + "; block " +
                     std::to_string(block.index[0]) + ", warp " + std::to_string(index);
  if (lane >= 0) text += ", lane " + std::to_string(lane);
  if (current != nullptr) {
    text += ", line " + std::to_string(current->line) + ": " +
            std::string(current->text.substr(0, 200));
  }
  throw KernelError(text);
}

}  // namespace winnow::emulator
