// SPDX-License-Identifier: Apache-2.0
// What runs: grids of clusters of thread blocks of warps.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "emulator/function.h"
#include "emulator/gpu.h"

namespace winnow::emulator {

class Block;
class GridRun;

/// Where shared memory begins among the 32-bit addresses of a block, as on Hopper.
inline constexpr std::uint32_t kSharedBegin = 1024;
/// Addresses of the cluster have the block's rank + 1 from this bit on.
inline constexpr int kRankBit = 24;

class Warp {
 public:
  Warp(Block& block, int index);
  ~Warp();
  Warp(const Warp&) = delete;
  Warp& operator=(const Warp&) = delete;

  Block& block;
  const int index;  // in the block
  LaneMask live = 0;
  std::array<std::uint32_t, kLanes> pc{};

  /// Runs a group of lanes that stand at the same instruction, for some instructions. Returns
  /// whether any was executed.
  bool run(int most);
  bool ended() const { return live == 0; }
  /// A description of where lanes stand, for reports.
  std::string where() const;

  // ---- For instructions.

  template <class T>
  T read(const Operand& operand, int lane) const;
  template <class T>
  void write(const Operand& operand, int lane, T value);
  LaneMask read_predicate(const Operand& operand) const {
    if (operand.kind == Operand::Kind::constant) return operand.value != 0 ? kAllLanes : 0;
    return predicates[operand.offset] ^ (operand.negated ? kAllLanes : 0);
  }
  void write_predicate(const Operand& operand, LaneMask mask, LaneMask value) {
    if (operand.kind != Operand::Kind::predicate) return;  // the sink _
    std::uint32_t& predicate = predicates[operand.offset];
    predicate = (predicate & ~mask) | (value & mask);
  }
  std::uint64_t address(const Operand& operand, int lane) const;
  /// The bytes behind an address of shared memory, of this block or of its cluster.
  std::byte* shared(std::uint64_t address, std::size_t bytes, int lane) const;
  /// The same of an address in device memory, shared memory included.
  std::byte* generic(std::uint64_t address, std::size_t bytes, int lane) const;
  /// `bytes` is a power of two.
  void check_alignment(std::uint64_t address, std::size_t bytes, int lane) const {
    if ((address & (bytes - 1)) != 0) fail_alignment(address, bytes, lane);
  }
  [[noreturn]] void fail(const std::string& what, int lane = -1) const;
  /// Lets this warp rest until an mbarrier has changed, if all of its lanes that can go on wait.
  void rest(LaneMask waiting);

  std::vector<std::byte> registers;
  std::vector<std::uint32_t> predicates;
  std::vector<std::byte> call_memory;  // [lanes, call_bytes]

  bool has_arrived = false;  // at the barrier that it waits at
  std::uint64_t barrier_generation = 0;
  std::uint64_t cluster_generation = 0;  // of the cluster's barrier when the warp arrived there
  std::uint64_t paused_until = 0;        // the turn from which it runs again

  /// cp.async copies that have not landed, in the order of their start.
  struct Copy {
    LaneMask mask = 0;
    std::array<std::uint64_t, kLanes> source;
    std::array<std::uint32_t, kLanes> target;  // shared; of an arrival: the mbarrier
    std::array<std::uint32_t, kLanes> group;
    std::array<std::uint8_t, kLanes> source_bytes;
    const Instruction* instruction = nullptr;
    int bytes = 0;          // 0: an arrival at an mbarrier
    std::uint64_t due = 0;  // the turn before which it lands only if it is waited for
  };
  std::deque<Copy> copies;
  std::array<std::uint32_t, kLanes> copy_group{};  // that is open
  /// Lets copies land: those of lanes in `mask` whose group is below `group`.
  void land(LaneMask mask, const std::array<std::uint32_t, kLanes>& group);
  void land_first();

  /// Products that have been issued: what they read may not change until they are waited for.
  struct Product {
    std::uint64_t a = 0, b = 0;  // descriptors; a: 0 if it came from registers
    std::uint64_t a_hash = 0, b_hash = 0;
    std::int64_t shape = 0;
    std::uint32_t line = 0;
    int group = 0;
  };
  std::deque<Product> products;
  int product_group = 0;

  /// Bulk copies from shared memory that each lane has started; see async_copy.cc.
  std::array<int, kLanes> bulk_group{};

  // By the clock, see proxies.h.
  std::uint64_t fenced_at = 0;    // the last proxy fence
  std::uint64_t finished_at = 0;  // the last proxy fence or barrier: no access before is under way

  const Instruction* current = nullptr;  // for reports

 private:
  bool pick_group(std::uint32_t& place, LaneMask& mask) const;
  /// Of lanes at an instruction that names those which execute it together: a set that is
  /// complete, or none.
  LaneMask pick_complete(const Operand& names, LaneMask active) const;
  std::byte* far_shared(std::uint64_t address, std::size_t bytes, int lane) const;
  std::byte* other_memory(std::uint64_t address, std::size_t bytes, int lane) const;
  [[noreturn]] void fail_alignment(std::uint64_t address, std::size_t bytes, int lane) const;

  LaneMask stuck_ = 0;  // lanes that wait for others of the warp
  bool prefer_others_ = false;
  std::uint64_t rests_until_ = ~std::uint64_t{0};  // there are more changes of mbarriers than this
};

struct NamedBarrier {
  int arrived = 0;   // threads
  int expected = 0;  // 0: nobody has come yet
  std::uint64_t generation = 0;
  bool any = false;
  int count = 0;
  bool last_any = false;
  int last_count = 0;
};

/// TMA copies multiples of so many bytes.
inline constexpr std::size_t kAccessBytes = 16;
/// An ordinary access of shared memory, see proxies.h.
struct Access {
  const Warp* warp = nullptr;
  const Instruction* instruction = nullptr;
  std::uint64_t time = 0;

  bool is_finished() const { return warp == nullptr || warp->finished_at > time; }
};

class Block {
 public:
  Block(GridRun& grid, std::array<unsigned, 3> index, unsigned rank);

  GridRun& grid;
  const std::array<unsigned, 3> index;
  const unsigned rank;  // in its cluster
  std::vector<Block*> cluster;
  std::byte* shared = nullptr;  // aligned to 1024 bytes
  std::size_t shared_bytes = 0;
  std::vector<Access> reads, writes;  // the last of every kAccessBytes of shared memory
  std::vector<std::unique_ptr<Warp>> warps;
  std::array<NamedBarrier, 16> barriers{};
  bool ended() const;
  /// What is noted of a place in shared memory of this block or its cluster; null of other memory.
  Access* access_of(std::vector<Access> Block::*kind, const std::byte* at) {
    const auto offset = static_cast<std::size_t>(at - shared);
    if (offset < shared_bytes) return &(this->*kind)[offset / kAccessBytes];
    return cluster.size() == 1 ? nullptr : far_access_of(kind, at);
  }

 private:
  Access* far_access_of(std::vector<Access> Block::*kind, const std::byte* at) const;

  std::unique_ptr<std::byte[]> shared_storage_;
};

/// A copy by TMA, which completes some time after it was started.
struct BulkCopy {
  std::function<void()> complete;
  std::uint64_t due = 0;  // the turn before which it completes only if it is waited for
  Warp* warp = nullptr;   // of a copy from shared memory: whose, and in which group
  int lane = 0;
  int group = 0;
};

class GridRun {
 public:
  GridRun(Gpu& gpu, const Function& function, const Grid& grid, const std::byte* parameters);
  void run();

  Gpu& gpu;
  const Function& function;
  const Grid& grid;
  const std::byte* parameters;
  std::vector<BulkCopy> bulk_copies;
  std::uint64_t clock = 0;
  std::uint64_t mbarrier_changes = 0;
  std::vector<std::vector<std::byte>> free_registers;  // of warps that have ended
  /// Arrivals at the barrier of a cluster, by its first block.
  struct ClusterBarrier {
    int arrived = 0;
    std::uint64_t generation = 0;
  };
  std::map<const Block*, ClusterBarrier> cluster_barriers;

  std::uint32_t random(std::uint32_t below);
  /// When a copy that starts now is due: at once, or after thousands of turns.
  std::uint64_t random_due() { return turns_ + (std::uint64_t{1} << random(14)); }
  void complete(std::size_t copy);
  Memory::Range last_range;  // of the last access to device memory

 private:
  void start_cluster();
  /// Lets a warp run, and copies complete in between.
  void take_turn(Warp& warp);
  /// Drops a warp that has ended, and its cluster with the last one.
  void retire(std::size_t chosen);

  std::uint64_t next_ = 0;  // cluster
  std::uint64_t random_state_;
  std::uint64_t turns_ = 0;
  std::size_t idle_turns_ = 0;  // one after another
  std::vector<std::unique_ptr<Block>> resident_;
  std::vector<Warp*> warps_;  // of resident blocks, that have not ended
};

inline std::byte* Warp::shared(std::uint64_t address, std::size_t bytes, int lane) const {
  const std::uint64_t offset = address - kSharedBegin;
  if (offset < block.shared_bytes && offset + bytes <= block.shared_bytes) {
    return block.shared + offset;
  }
  return far_shared(address, bytes, lane);
}

inline std::byte* Warp::generic(std::uint64_t address, std::size_t bytes, int lane) const {
  auto* const at = reinterpret_cast<std::byte*>(address);
  const Memory::Range& range = block.grid.last_range;
  const bool holds =
      at >= range.begin && at < range.end && bytes <= static_cast<std::size_t>(range.end - at);
  return holds ? at : other_memory(address, bytes, lane);
}

template <class T>
T Warp::read(const Operand& operand, int lane) const {
  using Slot = std::conditional_t<sizeof(T) == 8, std::uint64_t, std::uint32_t>;
  Slot slot;
  if (operand.kind == Operand::Kind::reg) {
    if (sizeof(T) == 8 && operand.bytes == 4) {
      std::uint32_t narrow;
      std::memcpy(&narrow, registers.data() + operand.offset + lane * 4, 4);
      slot = narrow;
    } else {
      std::memcpy(&slot, registers.data() + operand.offset + lane * operand.bytes, sizeof slot);
    }
  } else if (operand.kind != Operand::Kind::constant) {
    fail("an operand that is no value", lane);
  } else if constexpr (sizeof(T) == 8) {
    slot = operand.constant->wide[lane];
  } else {
    slot = operand.constant->narrow[lane];
  }
  T value;
  std::memcpy(&value, &slot, sizeof value);
  return value;
}

template <class T>
void Warp::write(const Operand& operand, int lane, T value) {
  if (operand.kind != Operand::Kind::reg) return;  // the sink _
  std::byte* const place = registers.data() + operand.offset + lane * operand.bytes;
  if (operand.bytes == 8) {
    std::uint64_t slot = 0;
    if constexpr (std::is_integral_v<T>) {
      slot = static_cast<std::uint64_t>(static_cast<std::int64_t>(value));
      if constexpr (std::is_unsigned_v<T>) slot = value;
    } else {
      std::memcpy(&slot, &value, sizeof value);
    }
    std::memcpy(place, &slot, 8);
  } else {
    std::uint32_t slot = 0;
    if constexpr (std::is_integral_v<T>) {
      slot = static_cast<std::uint32_t>(value);
    } else {
      std::memcpy(&slot, &value, std::min(sizeof value, sizeof slot));
    }
    std::memcpy(place, &slot, 4);
  }
}

/// Calls f for each lane of a mask.
template <class F>
void for_lanes(LaneMask mask, F f) {
  for (; mask != 0; mask &= mask - 1) f(std::countr_zero(mask));
}

/// The first lane of a mask.
inline int first_lane(LaneMask mask) { return std::countr_zero(mask); }

}  // namespace winnow::emulator
