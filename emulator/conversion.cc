// SPDX-License-Identifier: Apache-2.0
// Conversions and moves.
#include <cmath>
#include <limits>
#include <utility>

#include "emulator/lanes.h"
#include "emulator/small_floats.h"

namespace winnow::emulator {
namespace {

enum class Rounding { nearest, zero, down, up };

template <class T>
T rounded_to_integral(T x, Rounding rounding) {
  switch (rounding) {
    case Rounding::nearest:
      return std::nearbyint(x);
    case Rounding::zero:
      return std::trunc(x);
    case Rounding::down:
      return std::floor(x);
    default:
      return std::ceil(x);
  }
}

template <class To, class From>
To convert(From x, Rounding rounding, bool saturates) {
  if constexpr (std::is_floating_point_v<From> && std::is_integral_v<To>) {
    if (x != x) {  // the highest bit alone where either has 64 bits, else 0
      constexpr bool kIsWide = sizeof(To) == 8 || sizeof(From) == 8;
      return kIsWide ? static_cast<To>(std::uint64_t{1} << (8 * sizeof(To) - 1)) : To{0};
    }
    const From r = rounded_to_integral(x, rounding);
    const From low = static_cast<From>(std::numeric_limits<To>::min());
    const From high = std::ldexp(From{1}, 8 * int{sizeof(To)} - (std::is_signed_v<To> ? 1 : 0));
    if (r < low) return std::numeric_limits<To>::min();
    if (r >= high) return std::numeric_limits<To>::max();
    return static_cast<To>(r);
  } else if constexpr (std::is_floating_point_v<To>) {
    To y = static_cast<To>(x);
    if constexpr (std::is_integral_v<From> || sizeof(From) > sizeof(To)) {
      // The compiler's conversion is to the nearest.
      const long double exact = x;
      if (rounding == Rounding::up && y < exact) y = std::nextafter(y, To(INFINITY));
      if (rounding == Rounding::down && y > exact) y = std::nextafter(y, -To(INFINITY));
      if (rounding == Rounding::zero && std::fabs(static_cast<long double>(y)) > std::fabs(exact)) {
        y = std::nextafter(y, To{0});
      }
    }
    if (saturates) y = y != y ? 0 : y < 0 ? 0 : y > 1 ? 1 : y;
    return y;
  } else {
    if (saturates && std::cmp_less(x, std::numeric_limits<To>::min())) {
      return std::numeric_limits<To>::min();
    }
    if (saturates && std::cmp_greater(x, std::numeric_limits<To>::max())) {
      return std::numeric_limits<To>::max();
    }
    return static_cast<To>(x);
  }
}

constexpr std::int64_t kSaturates = 16;
constexpr std::int64_t kToIntegral = 32;

template <class To, class From>
Outcome convert_lanes(Warp& warp, const Instruction& i, LaneMask mask) {
  const auto rounding = static_cast<Rounding>(i.variant & 15);
  const bool saturates = (i.variant & kSaturates) != 0;
  if constexpr (std::is_integral_v<To> && std::is_integral_v<From>) {
    const bool is_wider =
        i.operands[1].kind == Operand::Kind::reg && i.operands[1].bytes != sizeof(SlotOf<From>);
    if (!saturates && !is_wider) {
      const auto* a = source<From>(warp, i.operands[1]);
      if (i.operands[0].bytes == 8) {
        auto* d = target<std::uint64_t>(warp, i.operands[0]);
        fill(d, mask, [=](int lane) {
          return to_slot<std::int64_t>(
              static_cast<std::int64_t>(static_cast<To>(from_slot<From>(a[lane]))));
        });
      } else {
        auto* d = target<std::uint32_t>(warp, i.operands[0]);
        fill(d, mask, [=](int lane) {
          return static_cast<std::uint32_t>(static_cast<To>(from_slot<From>(a[lane])));
        });
      }
      return Outcome::done;
    }
  }
  for_lanes(mask, [&](int lane) {
    From x = warp.read<From>(i.operands[1], lane);
    if constexpr (std::is_floating_point_v<From>) {
      if (i.variant & kToIntegral) x = rounded_to_integral(x, rounding);
    }
    warp.write<To>(i.operands[0], lane, convert<To>(x, rounding, saturates));
  });
  return Outcome::done;
}

/// Small floats to fp32.
template <float (*kFrom)(std::uint16_t)>
Outcome widen(Warp& warp, const Instruction& i, LaneMask mask) {
  const auto* a = source<std::uint16_t>(warp, i.operands[1]);
  fill(target<float>(warp, i.operands[0]), mask,
       [=](int lane) { return to_slot<float>(kFrom(static_cast<std::uint16_t>(a[lane]))); });
  return Outcome::done;
}
template <std::uint16_t (*kTo)(float)>
Outcome narrow(Warp& warp, const Instruction& i, LaneMask mask) {
  const auto* a = source<float>(warp, i.operands[1]);
  fill(target<std::uint16_t>(warp, i.operands[0]), mask,
       [=](int lane) { return std::uint32_t{kTo(from_slot<float>(a[lane]))}; });
  return Outcome::done;
}
/// The first source becomes the high half.
template <std::uint16_t (*kTo)(float)>
Outcome narrow_pair(Warp& warp, const Instruction& i, LaneMask mask) {
  const auto* a = source<float>(warp, i.operands[1]);
  const auto* b = source<float>(warp, i.operands[2]);
  fill(target<std::uint32_t>(warp, i.operands[0]), mask, [=](int lane) {
    return std::uint32_t{kTo(from_slot<float>(a[lane]))} << 16 | kTo(from_slot<float>(b[lane]));
  });
  return Outcome::done;
}
Outcome narrow_pair_to_e4m3(Warp& warp, const Instruction& i, LaneMask mask) {
  for_lanes(mask, [&](int lane) {
    const std::uint32_t high = to_e4m3(warp.read<float>(i.operands[1], lane));
    const std::uint32_t low = to_e4m3(warp.read<float>(i.operands[2], lane));
    warp.write<std::uint16_t>(i.operands[0], lane, static_cast<std::uint16_t>(high << 8 | low));
  });
  return Outcome::done;
}
Outcome widen_pair_of_e4m3(Warp& warp, const Instruction& i, LaneMask mask) {
  for_lanes(mask, [&](int lane) {
    const std::uint16_t pair = warp.read<std::uint16_t>(i.operands[1], lane);
    const std::uint32_t low = to_f16(from_e4m3(static_cast<std::uint8_t>(pair)));
    const std::uint32_t high = to_f16(from_e4m3(static_cast<std::uint8_t>(pair >> 8)));
    warp.write<std::uint32_t>(i.operands[0], lane, high << 16 | low);
  });
  return Outcome::done;
}

// ---- Moves.

template <class T>
Outcome move(Warp& warp, const Instruction& i, LaneMask mask) {
  const auto* a = source<T>(warp, i.operands[1]);
  fill(target<T>(warp, i.operands[0]), mask, [=](int lane) { return a[lane]; });
  return Outcome::done;
}

/// Addresses of parameters, and special registers.
template <class T>
Outcome move_address(Warp& warp, const Instruction& i, LaneMask mask) {
  for_lanes(mask, [&](int lane) {
    warp.write<T>(i.operands[0], lane, static_cast<T>(warp.address(i.operands[1], lane)));
  });
  return Outcome::done;
}

std::uint64_t special(const Warp& warp, Special which, int lane) {
  const Block& block = warp.block;
  const Grid& grid = block.grid.grid;
  const unsigned thread = static_cast<unsigned>(warp.index) * kLanes + static_cast<unsigned>(lane);
  const unsigned x = grid.threads[0], y = grid.threads[1];
  const LaneMask own = LaneMask{1} << lane;
  switch (which) {
    case Special::tid_x:
      return thread % x;
    case Special::tid_y:
      return thread / x % y;
    case Special::tid_z:
      return thread / x / y;
    case Special::ntid_x:
      return x;
    case Special::ntid_y:
      return y;
    case Special::ntid_z:
      return grid.threads[2];
    case Special::ctaid_x:
      return block.index[0];
    case Special::ctaid_y:
      return block.index[1];
    case Special::ctaid_z:
      return block.index[2];
    case Special::nctaid_x:
      return grid.blocks[0];
    case Special::nctaid_y:
      return grid.blocks[1];
    case Special::nctaid_z:
      return grid.blocks[2];
    case Special::laneid:
      return static_cast<std::uint64_t>(lane);
    case Special::warpid:
      return static_cast<std::uint64_t>(warp.index);
    case Special::lanemask_lt:
      return own - 1;
    case Special::lanemask_le:
      return own | (own - 1);
    case Special::lanemask_gt:
      return ~(own | (own - 1));
    case Special::lanemask_ge:
      return ~(own - 1);
    case Special::lanemask_eq:
      return own;
    case Special::cluster_ctarank:
      return block.rank;
    case Special::cluster_nctarank:
      return block.cluster.size();
    case Special::smid:
      return block.index[0] % Gpu::kMultiprocessors;
    default:
      return block.grid.clock;
  }
}

template <class T>
Outcome move_special(Warp& warp, const Instruction& i, LaneMask mask) {
  const auto which = static_cast<Special>(i.operands[1].value);
  for_lanes(mask, [&](int lane) {
    warp.write<T>(i.operands[0], lane, static_cast<T>(special(warp, which, lane)));
  });
  return Outcome::done;
}

/// mov.b64 d, {a, b} and its like: the first element is the lowest.
Outcome pack(Warp& warp, const Instruction& i, LaneMask mask) {
  const int parts = i.count - 1;
  const int bits = static_cast<int>(i.variant) / parts;
  for_lanes(mask, [&](int lane) {
    std::uint64_t word = 0;
    for (int part = 0; part < parts; ++part) {
      const std::uint64_t value = warp.read<std::uint64_t>(i.operands[1 + part], lane);
      word |= (bits == 64 ? value : value & ((std::uint64_t{1} << bits) - 1)) << (part * bits);
    }
    warp.write<std::uint64_t>(i.operands[0], lane, word);
  });
  return Outcome::done;
}
Outcome unpack(Warp& warp, const Instruction& i, LaneMask mask) {
  const int parts = i.count - 1;
  const int bits = static_cast<int>(i.variant) / parts;
  for_lanes(mask, [&](int lane) {
    const std::uint64_t word = warp.read<std::uint64_t>(i.operands[parts], lane);
    for (int part = 0; part < parts; ++part) {
      const std::uint64_t value = (word >> (part * bits)) & ((std::uint64_t{1} << bits) - 1);
      warp.write<std::uint64_t>(i.operands[part], lane, value);
    }
  });
  return Outcome::done;
}

/// Addresses of shared memory from and to generic ones; all others are generic already.
Outcome shared_to_generic(Warp& warp, const Instruction& i, LaneMask mask) {
  for_lanes(mask, [&](int lane) {
    const std::uint64_t address = warp.address(i.operands[1], lane);
    const auto base = reinterpret_cast<std::uint64_t>(warp.block.shared);
    warp.write<std::uint64_t>(i.operands[0], lane, base + address - kSharedBegin);
  });
  return Outcome::done;
}
Outcome generic_to_shared(Warp& warp, const Instruction& i, LaneMask mask) {
  for_lanes(mask, [&](int lane) {
    const std::uint64_t address = warp.address(i.operands[1], lane);
    const auto base = reinterpret_cast<std::uint64_t>(warp.block.shared);
    warp.write<std::uint64_t>(i.operands[0], lane, address - base + kSharedBegin);
  });
  return Outcome::done;
}

Rounding rounding_of(const Written& written) {
  if (written.has("rz") || written.has("rzi")) return Rounding::zero;
  if (written.has("rm") || written.has("rmi")) return Rounding::down;
  if (written.has("rp") || written.has("rpi")) return Rounding::up;
  return Rounding::nearest;
}

Execute conversion_of(const Written& written, Instruction& instruction) {
  const std::string_view to = written.opcode[written.opcode.size() - 2];
  const std::string_view from = written.last();
  if (from == "bf16" && to == "f32") return widen<from_bf16>;
  if (from == "f16" && to == "f32") return widen<from_f16>;
  if (from == "f32" && rounding_of(written) == Rounding::nearest && !written.has("relu")) {
    if (to == "bf16") return narrow<to_bf16>;
    if (to == "f16") return narrow<to_f16>;
    if (to == "bf16x2") return narrow_pair<to_bf16>;
    if (to == "f16x2") return narrow_pair<to_f16>;
    if (to == "e4m3x2") return narrow_pair_to_e4m3;
  }
  if (from == "e4m3x2" && to == "f16x2") return widen_pair_of_e4m3;
  instruction.variant = static_cast<std::int64_t>(rounding_of(written));
  if (written.has("sat")) instruction.variant |= kSaturates;
  if (written.has("rni") || written.has("rzi") || written.has("rmi") || written.has("rpi")) {
    instruction.variant |= kToIntegral;
  }
  Execute found = nullptr;
  with_type(to, [&](auto t) {
    with_type(from, [&](auto f) { found = convert_lanes<decltype(t), decltype(f)>; });
  });
  return found;
}

Execute move_of(const Written& written, Instruction& instruction) {
  const std::string_view type = written.last();
  const bool wide = type.substr(1) == "64";
  instruction.variant = wide ? 64 : type.substr(1) == "16" ? 16 : 32;
  if (written.operands[1].size() > 1) return pack;
  if (written.operands[0].size() > 1) return unpack;
  switch (written.operands[1][0].kind) {
    case Operand::Kind::special:
      return wide ? move_special<std::uint64_t> : move_special<std::uint32_t>;
    case Operand::Kind::parameter:
    case Operand::Kind::call_slot:
      return wide ? move_address<std::uint64_t> : move_address<std::uint32_t>;
    default:
      return wide ? move<std::uint64_t> : move<std::uint32_t>;
  }
}

}  // namespace

bool decode_conversion(const Written& written, Instruction& instruction) {
  const std::string_view op = written.opcode[0];
  Execute& execute = instruction.execute;
  if (op == "cvt") execute = conversion_of(written, instruction);
  if (op == "mov" && written.last() != "pred") execute = move_of(written, instruction);
  if (op == "cvta") {
    if (!written.has("shared")) {
      execute = move_address<std::uint64_t>;
    } else {
      execute = written.has("to") ? generic_to_shared : shared_to_generic;
    }
  }
  return execute != nullptr;
}

}  // namespace winnow::emulator
