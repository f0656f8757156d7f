// SPDX-License-Identifier: Apache-2.0
// Logic, shifts, and fields of bits and bytes.
#include <algorithm>
#include <bit>
#include <functional>

#include "emulator/lanes.h"

namespace winnow::emulator {
namespace {

using And = std::bit_and<>;
using Or = std::bit_or<>;
using Xor = std::bit_xor<>;
using Not = std::bit_not<>;
struct Brev {
  template <class T>
  T operator()(T a) const {
    T b = 0;
    for (unsigned i = 0; i < 8 * sizeof a; ++i) b |= ((a >> i) & T{1}) << (8 * sizeof a - 1 - i);
    return b;
  }
};

template <class T, bool kLeft>
Outcome shift(Warp& warp, const Instruction& i, LaneMask mask) {
  const auto* a = source<T>(warp, i.operands[1]);
  const auto* by = source<std::uint32_t>(warp, i.operands[2]);
  constexpr std::uint32_t kBits = 8 * sizeof(T);
  fill(target<T>(warp, i.operands[0]), mask, [=](int lane) {
    const T x = from_slot<T>(a[lane]);
    const std::uint32_t n = by[lane];
    if constexpr (kLeft) {
      return to_slot<T>(n >= kBits ? T{0} : static_cast<T>(x << n));
    } else {
      return to_slot<T>(n >= kBits ? static_cast<T>(std::is_signed_v<T> && x < 0 ? -1 : 0)
                                   : static_cast<T>(x >> n));
    }
  });
  return Outcome::done;
}

template <class T>
Outcome leading_zeros(Warp& warp, const Instruction& i, LaneMask mask) {
  for_lanes(mask, [&](int lane) {
    const T a = warp.read<T>(i.operands[1], lane);
    warp.write<std::uint32_t>(i.operands[0], lane, std::countl_zero(a));
  });
  return Outcome::done;
}
template <class T>
Outcome count_ones(Warp& warp, const Instruction& i, LaneMask mask) {
  for_lanes(mask, [&](int lane) {
    const T a = warp.read<T>(i.operands[1], lane);
    warp.write<std::uint32_t>(i.operands[0], lane, std::popcount(a));
  });
  return Outcome::done;
}

/// The highest bit that is set (of signed: that differs from the sign), or how far to shift it to
/// the top.
template <class T, bool kShiftAmount>
Outcome find_bit(Warp& warp, const Instruction& i, LaneMask mask) {
  for_lanes(mask, [&](int lane) {
    T a = warp.read<T>(i.operands[1], lane);
    if (std::is_signed_v<T> && a < 0) a = ~a;
    const auto bits = static_cast<std::make_unsigned_t<T>>(a);
    const int zeros = std::countl_zero(bits);
    const int top = static_cast<int>(8 * sizeof(T)) - 1;
    const int found = bits == 0 ? -1 : kShiftAmount ? zeros : top - zeros;
    warp.write<std::uint32_t>(i.operands[0], lane, static_cast<std::uint32_t>(found));
  });
  return Outcome::done;
}

/// bfi d, a, b, c, length: `length` low bits of a at bit c of b.
template <class T>
Outcome insert_bits(Warp& warp, const Instruction& i, LaneMask mask) {
  for_lanes(mask, [&](int lane) {
    const T a = warp.read<T>(i.operands[1], lane);
    const T b = warp.read<T>(i.operands[2], lane);
    const std::uint32_t from = warp.read<std::uint32_t>(i.operands[3], lane) & 0xff;
    const std::uint32_t length = warp.read<std::uint32_t>(i.operands[4], lane) & 0xff;
    T result = b;
    for (std::uint32_t bit = 0; bit < length && from + bit < 8 * sizeof(T); ++bit) {
      const T at = T{1} << (from + bit);
      result = (a >> bit) & 1 ? result | at : result & ~at;
    }
    warp.write<T>(i.operands[0], lane, result);
  });
  return Outcome::done;
}

/// bfe d, a, b, length: `length` bits of a from bit b on, extended by the sign where it is signed.
template <class T>
Outcome extract_bits(Warp& warp, const Instruction& i, LaneMask mask) {
  for_lanes(mask, [&](int lane) {
    const auto a = static_cast<std::make_unsigned_t<T>>(warp.read<T>(i.operands[1], lane));
    const int from = static_cast<int>(warp.read<std::uint32_t>(i.operands[2], lane) & 0xff);
    const int length = static_cast<int>(warp.read<std::uint32_t>(i.operands[3], lane) & 0xff);
    const int top = static_cast<int>(8 * sizeof(T)) - 1;
    const bool sign =
        std::is_signed_v<T> && length > 0 && (a >> std::min(from + length - 1, top)) & 1;
    std::make_unsigned_t<T> result = 0;
    for (int bit = 0; bit <= top; ++bit) {
      const bool set = bit < length && from + bit <= top ? (a >> (from + bit)) & 1 : sign;
      result |= std::make_unsigned_t<T>{set} << bit;
    }
    warp.write<T>(i.operands[0], lane, static_cast<T>(result));
  });
  return Outcome::done;
}

/// bmsk.clamp d, a, b: b ones from bit a on.
Outcome make_mask(Warp& warp, const Instruction& i, LaneMask mask) {
  for_lanes(mask, [&](int lane) {
    const std::uint64_t from = std::min(warp.read<std::uint32_t>(i.operands[1], lane), 32u);
    const std::uint64_t length = std::min(warp.read<std::uint32_t>(i.operands[2], lane), 32u);
    const std::uint64_t ones = ((std::uint64_t{1} << length) - 1) << from;
    warp.write<std::uint32_t>(i.operands[0], lane, static_cast<std::uint32_t>(ones));
  });
  return Outcome::done;
}

/// prmt.b32 d, a, b, c: bytes of the pair (a, b) by the four nibbles of c.
Outcome permute_bytes(Warp& warp, const Instruction& i, LaneMask mask) {
  for_lanes(mask, [&](int lane) {
    const std::uint64_t bytes = warp.read<std::uint32_t>(i.operands[1], lane) |
                                std::uint64_t{warp.read<std::uint32_t>(i.operands[2], lane)} << 32;
    const std::uint32_t choice = warp.read<std::uint32_t>(i.operands[3], lane);
    std::uint32_t result = 0;
    for (int byte = 0; byte < 4; ++byte) {
      const std::uint32_t nibble = (choice >> (4 * byte)) & 15;
      std::uint32_t value = (bytes >> (8 * (nibble & 7))) & 0xff;
      if (nibble & 8) value = value & 0x80 ? 0xff : 0;
      result |= value << (8 * byte);
    }
    warp.write<std::uint32_t>(i.operands[0], lane, result);
  });
  return Outcome::done;
}

/// shf.{l,r}.{wrap,clamp}.b32 d, a, b, c: the high or low word of the shifted pair (b, a).
template <bool kLeft, bool kWraps>
Outcome funnel_shift(Warp& warp, const Instruction& i, LaneMask mask) {
  for_lanes(mask, [&](int lane) {
    const std::uint64_t pair = warp.read<std::uint32_t>(i.operands[1], lane) |
                               std::uint64_t{warp.read<std::uint32_t>(i.operands[2], lane)} << 32;
    const std::uint32_t by = warp.read<std::uint32_t>(i.operands[3], lane);
    const std::uint32_t n = kWraps ? by & 31 : std::min(by, 32u);
    const std::uint64_t shifted = kLeft ? (pair << n) >> 32 : pair >> n;
    warp.write<std::uint32_t>(i.operands[0], lane, static_cast<std::uint32_t>(shifted));
  });
  return Outcome::done;
}

Outcome look_up_logic(Warp& warp, const Instruction& i, LaneMask mask) {  // lop3
  for_lanes(mask, [&](int lane) {
    const std::uint32_t a = warp.read<std::uint32_t>(i.operands[1], lane);
    const std::uint32_t b = warp.read<std::uint32_t>(i.operands[2], lane);
    const std::uint32_t c = warp.read<std::uint32_t>(i.operands[3], lane);
    const std::uint32_t table = warp.read<std::uint32_t>(i.operands[4], lane);
    std::uint32_t result = 0;
    for (int bit = 0; bit < 32; ++bit) {
      const std::uint32_t at = ((a >> bit) & 1) << 2 | ((b >> bit) & 1) << 1 | ((c >> bit) & 1);
      result |= ((table >> at) & 1) << bit;
    }
    warp.write<std::uint32_t>(i.operands[0], lane, result);
  });
  return Outcome::done;
}

template <class T>
Execute of_integer(const Written& written) {
  using U = std::make_unsigned_t<T>;
  const std::string_view op = written.opcode[0];
  if (op == "and") return binary<U, And>;
  if (op == "or") return binary<U, Or>;
  if (op == "xor") return binary<U, Xor>;
  if (op == "not") return unary<U, Not>;
  if (op == "shl") return shift<T, true>;
  if (op == "shr") return shift<T, false>;
  if (op == "brev") return unary<U, Brev>;
  if (op == "clz") return leading_zeros<U>;
  if (op == "popc") return count_ones<U>;
  if (op == "bfind") return written.has("shiftamt") ? find_bit<T, true> : find_bit<T, false>;
  if (op == "bfi") return insert_bits<U>;
  if (op == "bfe") return extract_bits<T>;
  return nullptr;
}

}  // namespace

bool decode_bits(const Written& written, Instruction& instruction) {
  const std::string_view op = written.opcode[0];
  Execute& execute = instruction.execute;
  if (op == "bmsk" && written.has("clamp")) execute = make_mask;
  if (op == "prmt" && written.opcode.size() == 2) execute = permute_bytes;
  if (op == "lop3" && written.opcode.size() == 2) execute = look_up_logic;
  if (op == "shf") {
    const bool wraps = written.has("wrap");
    execute = written.has("l") ? (wraps ? funnel_shift<true, true> : funnel_shift<true, false>)
                               : (wraps ? funnel_shift<false, true> : funnel_shift<false, false>);
  }
  if (execute != nullptr) return true;
  with_integer(written.last(), [&](auto t) { execute = of_integer<decltype(t)>(written); });
  return execute != nullptr;
}

}  // namespace winnow::emulator
