// SPDX-License-Identifier: Apache-2.0
// mbarriers: eight bytes of shared memory that count arrivals and bytes. Their layout is ours
// alone.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>

#include "emulator/warp.h"

namespace winnow::emulator {

class Mbarrier {
 public:
  explicit Mbarrier(int arrivals) : expected_(arrivals), pending_(arrivals) {}

  /// What stands in memory; `valid` tells whether an mbarrier was initialised there.
  static Mbarrier load(const std::byte* from, bool& valid) {
    std::uint64_t word;
    std::memcpy(&word, from, sizeof word);
    Mbarrier barrier(static_cast<int>(word & kCounts));
    barrier.pending_ = static_cast<int>((word >> kCountBits) & kCounts);
    barrier.bytes_ = static_cast<int>((word >> (2 * kCountBits)) & kBytes) - kBytesBias;
    barrier.phase_ = static_cast<std::uint32_t>((word >> 62) & 1);
    valid = (word >> 63) == 0 && barrier.expected_ > 0;
    return barrier;
  }
  void store(std::byte* to) const {
    const std::uint64_t word = static_cast<std::uint64_t>(expected_) |
                               static_cast<std::uint64_t>(pending_) << kCountBits |
                               static_cast<std::uint64_t>(bytes_ + kBytesBias) << (2 * kCountBits) |
                               std::uint64_t{phase_} << 62;
    std::memcpy(to, &word, sizeof word);
  }

  void arrive(int count) {
    pending_ -= count;
    is_wrong_ = is_wrong_ || pending_ < 0;
    complete_if_done();
  }
  void expect(int bytes) { bytes_ += bytes; }
  void land(int bytes) {
    bytes_ -= bytes;
    complete_if_done();
  }
  bool has_completed(std::uint32_t parity) const { return phase_ != parity; }
  /// More arrivals than a phase has.
  bool is_wrong() const { return is_wrong_; }

 private:
  static constexpr int kCountBits = 20;
  static constexpr std::uint64_t kCounts = (1 << kCountBits) - 1;
  static constexpr std::uint64_t kBytes = (1 << 22) - 1;
  static constexpr int kBytesBias = 1 << 21;  // bytes may land before they are expected

  void complete_if_done() {
    if (pending_ != 0 || bytes_ != 0) return;
    pending_ = expected_;
    phase_ ^= 1;
  }

  int expected_, pending_;
  int bytes_ = 0;
  std::uint32_t phase_ = 0;
  bool is_wrong_ = false;
};

/// The mbarrier at an address of shared memory.
inline Mbarrier read_mbarrier(const Warp& warp, std::uint64_t address, int lane) {
  warp.check_alignment(address, 8, lane);
  bool valid = false;
  const Mbarrier barrier = Mbarrier::load(warp.shared(address, 8, lane), valid);
  if (!valid)
    warp.fail("an mbarrier that was not initialised, at " + std::to_string(address), lane);
  return barrier;
}

/// Changes the mbarrier at an address of shared memory.
template <class F>
void change_mbarrier(const Warp& warp, std::uint64_t address, int lane, F f) {
  Mbarrier barrier = read_mbarrier(warp, address, lane);
  f(barrier);
  if (barrier.is_wrong()) {
    warp.fail("more arrivals at an mbarrier than its phase has, at " + std::to_string(address),
              lane);
  }
  barrier.store(warp.shared(address, 8, lane));
  ++warp.block.grid.mbarrier_changes;
}

}  // namespace winnow::emulator
