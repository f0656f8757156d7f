// SPDX-License-Identifier: Apache-2.0
// Barriers of thread blocks and clusters, mbarriers, and instructions that only order others:
// memory of the emulator is always in order. Proxy fences are noted.
#include "emulator/lanes.h"
#include "emulator/mbarrier.h"

namespace winnow::emulator {
namespace {

/// All threads of the block, or as many as the instruction names.
int expected_threads(Warp& warp, const Instruction& i, int operand, int lane) {
  if (operand >= i.count) return static_cast<int>(warp.block.warps.size()) * kLanes;
  const int threads = static_cast<int>(warp.read<std::uint32_t>(i.operands[operand], lane));
  if (threads <= 0 || threads % kLanes != 0) {
    warp.fail("a barrier for " + std::to_string(threads) + " threads");
  }
  return threads;
}

NamedBarrier& barrier_of(Warp& warp, const Instruction& i, int operand, LaneMask mask) {
  const std::uint32_t number = warp.read<std::uint32_t>(i.operands[operand], first_lane(mask));
  if (number >= warp.block.barriers.size()) warp.fail("no barrier " + std::to_string(number));
  return warp.block.barriers[number];
}

/// A warp's arrival counts for all of its lanes.
void arrive(Warp& warp, NamedBarrier& barrier, int expected) {
  if (barrier.arrived == 0) {
    barrier.expected = expected;
    barrier.any = false;
    barrier.count = 0;
  }
  if (barrier.expected != expected) {
    warp.fail("a barrier for " + std::to_string(expected) + " threads at which others wait for " +
              std::to_string(barrier.expected));
  }
  barrier.arrived += kLanes;
  if (barrier.arrived > barrier.expected) warp.fail("too many warps at a barrier");
}

void complete_if_full(NamedBarrier& barrier) {
  if (barrier.arrived < barrier.expected) return;
  barrier.arrived = 0;
  barrier.last_any = barrier.any;
  barrier.last_count = barrier.count;
  ++barrier.generation;
}

enum Reduction { none, any, all, count };

/// bar.sync a[, b] and bar.red.op d, a[, b], p
Outcome sync(Warp& warp, const Instruction& i, LaneMask mask) {
  const bool reduces = i.variant != none;
  const int first = reduces ? 1 : 0;
  NamedBarrier& barrier = barrier_of(warp, i, first, mask);
  if (!warp.has_arrived) {
    const bool has_count = i.count - first - (reduces ? 1 : 0) > 1;
    const int threads =
        expected_threads(warp, i, has_count ? first + 1 : i.count, first_lane(mask));
    arrive(warp, barrier, threads);
    warp.finished_at = warp.block.grid.clock;
    if (reduces) {
      const LaneMask votes = warp.read_predicate(i.operands[i.count - 1]) & mask;
      const LaneMask for_any = i.variant == all ? ~votes & mask : votes;
      barrier.any = barrier.any || for_any != 0;
      barrier.count += std::popcount(votes);
    }
    warp.barrier_generation = barrier.generation;
    warp.has_arrived = true;
    complete_if_full(barrier);
  }
  if (barrier.generation == warp.barrier_generation) return Outcome::blocked;
  warp.has_arrived = false;
  if (i.variant == any || i.variant == all) {
    const bool value = i.variant == all ? !barrier.last_any : barrier.last_any;
    warp.write_predicate(i.operands[0], mask, value ? kAllLanes : 0);
  } else if (i.variant == count) {
    for_lanes(mask, [&](int lane) {
      warp.write<std::uint32_t>(i.operands[0], lane,
                                static_cast<std::uint32_t>(barrier.last_count));
    });
  }
  return Outcome::done;
}

Outcome arrive_only(Warp& warp, const Instruction& i, LaneMask mask) {
  NamedBarrier& barrier = barrier_of(warp, i, 0, mask);
  arrive(warp, barrier, expected_threads(warp, i, 1, first_lane(mask)));
  complete_if_full(barrier);
  return Outcome::done;
}

Outcome cluster_arrive(Warp& warp, const Instruction&, LaneMask) {
  auto& barrier = warp.block.grid.cluster_barriers[warp.block.cluster[0]];
  std::size_t warps = 0;
  for (const Block* block : warp.block.cluster) warps += block->warps.size();
  warp.finished_at = warp.block.grid.clock;
  warp.cluster_generation = barrier.generation;
  if (++barrier.arrived == static_cast<int>(warps)) {
    barrier.arrived = 0;
    ++barrier.generation;
  }
  return Outcome::done;
}
Outcome cluster_wait(Warp& warp, const Instruction&, LaneMask) {
  const auto& barrier = warp.block.grid.cluster_barriers[warp.block.cluster[0]];
  return barrier.generation == warp.cluster_generation ? Outcome::blocked : Outcome::done;
}

/// fence.proxy.async
Outcome fence_proxy(Warp& warp, const Instruction&, LaneMask) {
  warp.fenced_at = warp.finished_at = warp.block.grid.clock;
  return Outcome::done;
}

// ---- mbarriers

Outcome init_mbarrier(Warp& warp, const Instruction& i, LaneMask mask) {
  for_lanes(mask, [&](int lane) {
    const std::uint64_t at = warp.address(i.operands[0], lane);
    warp.check_alignment(at, 8, lane);
    const int arrivals = static_cast<int>(warp.read<std::uint32_t>(i.operands[1], lane));
    Mbarrier(arrivals).store(warp.shared(at, 8, lane));
  });
  return Outcome::done;
}

/// Changes the mbarrier that each lane names.
template <class F>
void for_mbarriers(Warp& warp, const Operand& operand, LaneMask mask, F f) {
  for_lanes(mask, [&](int lane) {
    const std::uint64_t at = warp.address(operand, lane);
    change_mbarrier(warp, at, lane, [&](Mbarrier& barrier) { f(barrier, lane); });
  });
}

/// mbarrier.arrive _, [address]{, count}
Outcome arrive_at_mbarrier(Warp& warp, const Instruction& i, LaneMask mask) {
  for_mbarriers(warp, i.operands[1], mask, [&](Mbarrier& barrier, int lane) {
    const int arrivals =
        i.count > 2 ? static_cast<int>(warp.read<std::uint32_t>(i.operands[2], lane)) : 1;
    barrier.arrive(arrivals);
  });
  return Outcome::done;
}
/// mbarrier.arrive.expect_tx _, [address], bytes
Outcome arrive_and_expect(Warp& warp, const Instruction& i, LaneMask mask) {
  for_mbarriers(warp, i.operands[1], mask, [&](Mbarrier& barrier, int lane) {
    barrier.expect(static_cast<int>(warp.read<std::uint32_t>(i.operands[2], lane)));
    barrier.arrive(1);
  });
  return Outcome::done;
}
Outcome expect(Warp& warp, const Instruction& i, LaneMask mask) {
  for_mbarriers(warp, i.operands[0], mask, [&](Mbarrier& barrier, int lane) {
    barrier.expect(static_cast<int>(warp.read<std::uint32_t>(i.operands[1], lane)));
  });
  return Outcome::done;
}
/// mbarrier.{try,test}_wait.parity p, [address], parity
Outcome test_mbarrier(Warp& warp, const Instruction& i, LaneMask mask) {
  LaneMask completed = 0;
  std::uint64_t last = 0;
  Mbarrier barrier(0);
  for_lanes(mask, [&](int lane) {
    const std::uint64_t at = warp.address(i.operands[1], lane);
    if (at != last) barrier = read_mbarrier(warp, at, lane);  // lanes mostly wait for the same one
    last = at;
    const std::uint32_t parity = warp.read<std::uint32_t>(i.operands[2], lane) & 1;
    if (barrier.has_completed(parity)) completed |= LaneMask{1} << lane;
  });
  warp.write_predicate(i.operands[0], mask, completed);
  if (completed == mask) return Outcome::done;
  if (completed == 0) warp.rest(mask);
  return Outcome::yield;
}

Outcome sleep(Warp&, const Instruction&, LaneMask) { return Outcome::yield; }

}  // namespace

bool decode_barrier(const Written& written, Instruction& instruction) {
  const std::string_view op = written.opcode[0];
  Execute& execute = instruction.execute;
  if ((op == "bar" || op == "barrier") && !written.has("warp")) {
    instruction.is_aligned = true;
    if (written.has("cluster")) {
      execute = written.has("arrive") ? cluster_arrive : cluster_wait;
    } else if (written.has("sync")) {
      execute = sync;
    } else if (written.has("arrive")) {
      execute = arrive_only;
    } else if (written.has("red")) {
      instruction.variant = written.has("or") ? any : written.has("and") ? all : count;
      execute = sync;
    }
  } else if (op == "mbarrier") {
    if (written.has("init")) execute = init_mbarrier;
    if (written.has("expect_tx")) execute = written.has("arrive") ? arrive_and_expect : expect;
    if (written.has("arrive") && !written.has("expect_tx")) execute = arrive_at_mbarrier;
    if (written.has("parity")) execute = test_mbarrier;
    if (written.has("inval")) execute = do_nothing;
  } else if (op == "fence" || op == "membar" || op == "griddepcontrol" || op == "setmaxnreg" ||
             op == "prefetch") {
    instruction.is_aligned = op == "setmaxnreg";
    execute = written.has("proxy") && written.has("async") ? fence_proxy : do_nothing;
  } else if (op == "nanosleep") {
    execute = sleep;
  }
  return execute != nullptr;
}

}  // namespace winnow::emulator
