// SPDX-License-Identifier: Apache-2.0
// What the lanes of a warp tell each other: shuffles, votes, reductions.
#include <algorithm>

#include "emulator/lanes.h"

namespace winnow::emulator {
namespace {

enum Shuffle { bfly, idx, up, down };

/// shfl.sync.mode.b32 d[|p], a, b, c, mask
Outcome shuffle(Warp& warp, const Instruction& i, LaneMask mask) {
  const int first = i.first_source;
  std::uint32_t results[kLanes];
  LaneMask in_range = 0;
  for_lanes(mask, [&](int lane) {
    const std::uint32_t b = warp.read<std::uint32_t>(i.operands[first + 1], lane) & 31;
    const std::uint32_t c = warp.read<std::uint32_t>(i.operands[first + 2], lane);
    const int segment = static_cast<int>((c >> 8) & 31);
    const int clamp = static_cast<int>(c & 31);
    const int most = (lane & segment) | (clamp & ~segment);
    const int least = lane & segment;
    int from = 0;
    bool inside = false;
    switch (i.variant) {
      case up:
        from = lane - static_cast<int>(b);
        inside = from >= most;
        break;
      case down:
        from = lane + static_cast<int>(b);
        inside = from <= most;
        break;
      case bfly:
        from = lane ^ static_cast<int>(b);
        inside = from <= most;
        break;
      default:
        from = least | (static_cast<int>(b) & ~segment);
        inside = from <= most;
    }
    if (!inside) from = lane;
    if (!((mask >> from) & 1)) warp.fail("a shuffle reads a lane that does not take part", lane);
    if (inside) in_range |= LaneMask{1} << lane;
    results[lane] = warp.read<std::uint32_t>(i.operands[first], from);
  });
  for_lanes(mask, [&](int lane) { warp.write<std::uint32_t>(i.operands[0], lane, results[lane]); });
  if (first == 2) warp.write_predicate(i.operands[1], mask, in_range);
  return Outcome::done;
}

enum Vote { all, any, uni, ballot };

Outcome vote(Warp& warp, const Instruction& i, LaneMask mask) {
  const LaneMask votes = warp.read_predicate(i.operands[1]) & mask;
  switch (i.variant) {
    case ballot:
      for_lanes(mask, [&](int lane) { warp.write<std::uint32_t>(i.operands[0], lane, votes); });
      break;
    case all:
      warp.write_predicate(i.operands[0], mask, votes == mask ? kAllLanes : 0);
      break;
    case any:
      warp.write_predicate(i.operands[0], mask, votes != 0 ? kAllLanes : 0);
      break;
    default:
      warp.write_predicate(i.operands[0], mask, votes == mask || votes == 0 ? kAllLanes : 0);
  }
  return Outcome::done;
}

enum Reduction { add, minimum, maximum, conjunction, disjunction, exclusive };

template <class T>
Outcome reduce(Warp& warp, const Instruction& i, LaneMask mask) {
  T result = warp.read<T>(i.operands[1], first_lane(mask));
  for_lanes(mask & (mask - 1), [&](int lane) {
    const T value = warp.read<T>(i.operands[1], lane);
    switch (i.variant) {
      case add:
        result = static_cast<T>(std::uint32_t(result) + std::uint32_t(value));
        break;
      case minimum:
        result = std::min(result, value);
        break;
      case maximum:
        result = std::max(result, value);
        break;
      case conjunction:
        result &= value;
        break;
      case disjunction:
        result |= value;
        break;
      default:
        result ^= value;
    }
  });
  for_lanes(mask, [&](int lane) { warp.write<T>(i.operands[0], lane, result); });
  return Outcome::done;
}

Outcome match(Warp& warp, const Instruction& i, LaneMask mask) {  // match.any
  std::uint32_t results[kLanes];
  for_lanes(mask, [&](int lane) {
    const std::uint32_t own = warp.read<std::uint32_t>(i.operands[1], lane);
    results[lane] = 0;
    for_lanes(mask, [&](int other) {
      if (warp.read<std::uint32_t>(i.operands[1], other) == own) results[lane] |= 1u << other;
    });
  });
  for_lanes(mask, [&](int lane) { warp.write<std::uint32_t>(i.operands[0], lane, results[lane]); });
  return Outcome::done;
}

Outcome active_mask(Warp& warp, const Instruction& i, LaneMask mask) {
  for_lanes(mask, [&](int lane) { warp.write<std::uint32_t>(i.operands[0], lane, mask); });
  return Outcome::done;
}

}  // namespace

bool decode_exchange(const Written& written, Instruction& instruction) {
  const std::string_view op = written.opcode[0];
  const auto which = [&](std::initializer_list<std::string_view> names) {
    int index = 0;
    for (const std::string_view name : names) {
      if (written.has(name)) return index;
      ++index;
    }
    return -1;
  };
  instruction.has_lane_mask = true;
  if (op == "shfl") {
    instruction.variant = which({"bfly", "idx", "up", "down"});
    instruction.first_source = static_cast<std::uint16_t>(written.operands[0].size());
    instruction.execute = shuffle;
  } else if (op == "vote") {
    instruction.variant = which({"all", "any", "uni", "ballot"});
    instruction.execute = vote;
  } else if (op == "redux") {
    instruction.variant = which({"add", "min", "max", "and", "or", "xor"});
    instruction.execute = written.last() == "s32" ? reduce<std::int32_t> : reduce<std::uint32_t>;
  } else if (op == "match" && written.has("any") && written.last() == "b32") {
    instruction.execute = match;
  } else if (op == "bar" && written.has("warp")) {
    instruction.execute = do_nothing;
  } else if (op == "activemask") {
    instruction.has_lane_mask = false;
    instruction.execute = active_mask;
  } else {
    instruction.has_lane_mask = false;
    return false;
  }
  return instruction.variant >= 0;
}

}  // namespace winnow::emulator
