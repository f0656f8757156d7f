// SPDX-License-Identifier: Apache-2.0
// Loops over the lanes of a warp, in a form that compilers vectorise.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "emulator/warp.h"

namespace winnow::emulator {

/// Executes an instruction that only orders others, or only makes them faster.
inline Outcome do_nothing(Warp&, const Instruction&, LaneMask) { return Outcome::done; }

/// What holds a value in the register file: 8 bytes for types of 8, 4 for all others.
template <class T>
using SlotOf = std::conditional_t<sizeof(T) == 8, std::uint64_t, std::uint32_t>;

template <class T>
T from_slot(SlotOf<T> slot) {
  if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(slot);
  } else {
    T value;
    std::memcpy(&value, &slot, sizeof value);
    return value;
  }
}

template <class T>
SlotOf<T> to_slot(T value) {
  if constexpr (std::is_integral_v<T>) {
    return static_cast<SlotOf<T>>(value);  // extended by its sign
  } else {
    SlotOf<T> slot = 0;
    std::memcpy(&slot, &value, sizeof value);
    return slot;
  }
}

template <class T>
const SlotOf<T>* source(const Warp& warp, const Operand& operand) {
  if (operand.kind == Operand::Kind::reg) {
    if (operand.bytes != sizeof(SlotOf<T>)) warp.fail("a register of another width");
    return reinterpret_cast<const SlotOf<T>*>(warp.registers.data() + operand.offset);
  }
  if (operand.kind != Operand::Kind::constant) warp.fail("an operand that is no value");
  if constexpr (sizeof(T) == 8) {
    return operand.constant->wide.data();
  } else {
    return operand.constant->narrow.data();
  }
}

template <class T>
SlotOf<T>* target(Warp& warp, const Operand& operand) {
  if (operand.kind != Operand::Kind::reg) warp.fail("a destination that is no register");
  if (operand.bytes != sizeof(SlotOf<T>)) warp.fail("a register of another width");
  return reinterpret_cast<SlotOf<T>*>(warp.registers.data() + operand.offset);
}

/// d[lane] = f(lane) for the lanes of a mask.
template <class Slot, class F>
void fill(Slot* d, LaneMask mask, F f) {
  if (mask == kAllLanes) {
#pragma GCC ivdep
    for (int lane = 0; lane < kLanes; ++lane) d[lane] = f(lane);
  } else {
    for_lanes(mask, [&](int lane) { d[lane] = f(lane); });
  }
}

/// One operation of one, two or three operands of the same type.
template <class T, class F>
Outcome unary(Warp& warp, const Instruction& i, LaneMask mask) {
  const auto* a = source<T>(warp, i.operands[1]);
  fill(target<T>(warp, i.operands[0]), mask,
       [=](int lane) { return to_slot<T>(F()(from_slot<T>(a[lane]))); });
  return Outcome::done;
}
template <class T, class F>
Outcome binary(Warp& warp, const Instruction& i, LaneMask mask) {
  const auto* a = source<T>(warp, i.operands[1]);
  const auto* b = source<T>(warp, i.operands[2]);
  fill(target<T>(warp, i.operands[0]), mask,
       [=](int lane) { return to_slot<T>(F()(from_slot<T>(a[lane]), from_slot<T>(b[lane]))); });
  return Outcome::done;
}
template <class T, class F>
Outcome ternary(Warp& warp, const Instruction& i, LaneMask mask) {
  const auto* a = source<T>(warp, i.operands[1]);
  const auto* b = source<T>(warp, i.operands[2]);
  const auto* c = source<T>(warp, i.operands[3]);
  fill(target<T>(warp, i.operands[0]), mask, [=](int lane) {
    return to_slot<T>(F()(from_slot<T>(a[lane]), from_slot<T>(b[lane]), from_slot<T>(c[lane])));
  });
  return Outcome::done;
}

/// Calls f with a value of the type that PTX names, or returns false.
template <class F>
bool with_type(std::string_view name, F f) {
  if (name == "u8" || name == "b8") return f(std::uint8_t{}), true;
  if (name == "s8") return f(std::int8_t{}), true;
  if (name == "u16" || name == "b16") return f(std::uint16_t{}), true;
  if (name == "s16") return f(std::int16_t{}), true;
  if (name == "u32" || name == "b32") return f(std::uint32_t{}), true;
  if (name == "s32") return f(std::int32_t{}), true;
  if (name == "u64" || name == "b64") return f(std::uint64_t{}), true;
  if (name == "s64") return f(std::int64_t{}), true;
  if (name == "f32") return f(float{}), true;
  if (name == "f64") return f(double{}), true;
  return false;
}
template <class F>
bool with_integer(std::string_view name, F f) {
  return with_type(name, [&](auto type) {
    if constexpr (std::is_integral_v<decltype(type)>) f(type);
  });
}

}  // namespace winnow::emulator
