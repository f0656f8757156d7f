// SPDX-License-Identifier: Apache-2.0
// Loads, stores and atomic operations.
#include <algorithm>
#include <cstring>

#include "emulator/lanes.h"
#include "emulator/proxies.h"

namespace winnow::emulator {
namespace {

enum class Space { generic, shared, parameter };

template <Space kSpace>
std::byte* place(Warp& warp, const Operand& operand, std::size_t bytes, int lane) {
  const std::uint64_t address = warp.address(operand, lane);
  warp.check_alignment(address, bytes, lane);
  if constexpr (kSpace == Space::shared) return warp.shared(address, bytes, lane);
  if constexpr (kSpace == Space::parameter) return reinterpret_cast<std::byte*>(address);
  return warp.generic(address, bytes, lane);
}

template <Space kSpace, class T>
Outcome load(Warp& warp, const Instruction& i, LaneMask mask) {
  const int parts = i.count - 1;
  for_lanes(mask, [&](int lane) {
    const std::byte* from =
        place<kSpace>(warp, i.operands[parts], static_cast<std::size_t>(parts) * sizeof(T), lane);
    if constexpr (kSpace != Space::parameter) note_read(warp, i, from);
    T values[4];
    std::memcpy(values, from, static_cast<std::size_t>(parts) * sizeof(T));
    for (int part = 0; part < parts; ++part) warp.write<T>(i.operands[part], lane, values[part]);
  });
  return Outcome::done;
}

template <Space kSpace, class T>
Outcome store(Warp& warp, const Instruction& i, LaneMask mask) {
  const int parts = i.count - 1;
  for_lanes(mask, [&](int lane) {
    std::byte* to =
        place<kSpace>(warp, i.operands[0], static_cast<std::size_t>(parts) * sizeof(T), lane);
    if constexpr (kSpace != Space::parameter) note_write(warp, i, to);
    T values[4];
    for (int part = 0; part < parts; ++part)
      values[part] = warp.read<T>(i.operands[1 + part], lane);
    std::memcpy(to, values, static_cast<std::size_t>(parts) * sizeof(T));
  });
  return Outcome::done;
}

enum Operation {
  add,
  minimum,
  maximum,
  conjunction,
  disjunction,
  exclusive,
  exchange,
  compare_exchange
};

template <class T>
T combined(int operation, T old, T value, T other) {
  if constexpr (std::is_integral_v<T>) {
    switch (operation) {
      case conjunction:
        return old & value;
      case disjunction:
        return old | value;
      case exclusive:
        return old ^ value;
      case add:
        return static_cast<T>(std::make_unsigned_t<T>(old) + std::make_unsigned_t<T>(value));
      default:
        break;
    }
  }
  switch (operation) {
    case add:
      return old + value;
    case minimum:
      return std::min(old, value);
    case maximum:
      return std::max(old, value);
    case exchange:
      return value;
    default:
      return old == value ? other : old;
  }
}

/// atom has a destination; red has none and may have a vector of values.
template <Space kSpace, class T, bool kReturns>
Outcome atomic(Warp& warp, const Instruction& i, LaneMask mask) {
  constexpr int kAddress = kReturns ? 1 : 0;
  const auto operation = static_cast<int>(i.variant);
  const bool compares = operation == compare_exchange;
  const int values = i.count - kAddress - 1 - (compares ? 1 : 0);
  for_lanes(mask, [&](int lane) {
    std::byte* at = place<kSpace>(warp, i.operands[kAddress],
                                  static_cast<std::size_t>(values) * sizeof(T), lane);
    note_read(warp, i, at);
    note_write(warp, i, at);
    for (int k = 0; k < values; ++k) {
      T old;
      std::memcpy(&old, at + k * sizeof(T), sizeof old);
      const T value = warp.read<T>(i.operands[kAddress + 1 + k], lane);
      const T other = compares ? warp.read<T>(i.operands[kAddress + 2], lane) : T{};
      const T result = combined(operation, old, value, other);
      std::memcpy(at + k * sizeof(T), &result, sizeof result);
      if (kReturns) warp.write<T>(i.operands[0], lane, old);
    }
  });
  return Outcome::done;
}

template <class F>
void with_space(const Written& written, F f) {
  if (written.has("shared") || written.has("shared::cta") || written.has("shared::cluster")) {
    f(std::integral_constant<Space, Space::shared>());
  } else if (written.has("param") || written.has("param::entry") || written.has("param::func")) {
    f(std::integral_constant<Space, Space::parameter>());
  } else {
    f(std::integral_constant<Space, Space::generic>());
  }
}

bool decode_atomic(const Written& written, Instruction& instruction) {
  static constexpr std::string_view kNames[] = {"add", "min", "max",  "and",
                                                "or",  "xor", "exch", "cas"};
  int operation = 0;
  while (operation < 8 && !written.has(kNames[operation])) ++operation;
  if (operation == 8) return false;
  instruction.variant = operation;
  with_space(written, [&](auto space) {
    with_type(written.last(), [&](auto type) {
      using T = decltype(type);
      if constexpr (sizeof(T) >= 4) {
        instruction.execute =
            written.opcode[0] == "atom" ? atomic<space, T, true> : atomic<space, T, false>;
      }
    });
  });
  return instruction.execute != nullptr;
}

}  // namespace

bool decode_access(const Written& written, Instruction& instruction) {
  const std::string_view op = written.opcode[0];
  if (op == "atom" || op == "red")
    return !written.has("async") && decode_atomic(written, instruction);
  if (op != "ld" && op != "st") return false;
  if (written.has("async") || written.has("local") || written.has("v8")) return false;
  with_space(written, [&](auto space) {
    with_type(written.last(), [&](auto type) {
      using T = decltype(type);
      instruction.execute = op == "ld" ? load<space, T> : store<space, T>;
    });
  });
  return instruction.execute != nullptr;
}

}  // namespace winnow::emulator
