// SPDX-License-Identifier: Apache-2.0
// Comparisons, selections, and the logic of predicates.
#include <algorithm>
#include <array>
#include <utility>

#include "emulator/lanes.h"

namespace winnow::emulator {
namespace {

enum Comparison { eq, ne, lt, le, gt, ge, equ, neu, ltu, leu, gtu, geu, num, nan };

template <class T, int kComparison>
bool compare(T a, T b) {
  const bool unordered = a != a || b != b;
  switch (kComparison) {
    case eq:
      return a == b;
    case ne:
      return !unordered && a != b;
    case lt:
      return a < b;
    case le:
      return a <= b;
    case gt:
      return a > b;
    case ge:
      return a >= b;
    case equ:
      return unordered || a == b;
    case neu:
      return unordered || a != b;
    case ltu:
      return unordered || a < b;
    case leu:
      return unordered || a <= b;
    case gtu:
      return unordered || a > b;
    case geu:
      return unordered || a >= b;
    case num:
      return !unordered;
    default:
      return unordered;
  }
}

template <class T, int kComparison>
Outcome set_predicate(Warp& warp, const Instruction& i, LaneMask mask) {
  // setp.c.t p[|q], a, b; with .and, .or or .xor another predicate c follows.
  const int first = i.first_source;
  const auto* a = source<T>(warp, i.operands[first]);
  const auto* b = source<T>(warp, i.operands[first + 1]);
  LaneMask result = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    result |= LaneMask{compare<T, kComparison>(from_slot<T>(a[lane]), from_slot<T>(b[lane]))}
              << lane;
  }
  LaneMask inverse = ~result;
  if (i.variant != 0) {
    const LaneMask c = warp.read_predicate(i.operands[first + 2]);
    const auto combine = [&](LaneMask x) {
      return i.variant == 1 ? x & c : i.variant == 2 ? x | c : x ^ c;
    };
    result = combine(result);
    inverse = combine(inverse);
  }
  warp.write_predicate(i.operands[0], mask, result);
  if (first == 2) warp.write_predicate(i.operands[1], mask, inverse);
  return Outcome::done;
}

template <class T>
Execute comparison_of(std::string_view name) {
  static constexpr std::string_view kNames[] = {"eq",  "ne",  "lt",  "le",  "gt",  "ge",  "equ",
                                                "neu", "ltu", "leu", "gtu", "geu", "num", "nan"};
  // lo, ls, hi, hs are lt, le, gt, ge of unsigned integers.
  static constexpr std::string_view kUnsigned[] = {"lo", "ls", "hi", "hs"};
  int which = static_cast<int>(std::find(std::begin(kNames), std::end(kNames), name) - kNames);
  if (which == static_cast<int>(std::size(kNames))) {
    which = 2 + static_cast<int>(std::find(std::begin(kUnsigned), std::end(kUnsigned), name) -
                                 kUnsigned);
  }
  Execute found = nullptr;
  [&]<int... kWhich>(std::integer_sequence<int, kWhich...>) {
    ((kWhich == which ? (found = set_predicate<T, kWhich>, 0) : 0), ...);
  }
  (std::make_integer_sequence<int, 14>());
  return found;
}

template <class T>
Outcome select(Warp& warp, const Instruction& i, LaneMask mask) {
  const auto* a = source<T>(warp, i.operands[1]);
  const auto* b = source<T>(warp, i.operands[2]);
  const LaneMask chosen = warp.read_predicate(i.operands[3]);
  fill(target<T>(warp, i.operands[0]), mask,
       [=](int lane) { return (chosen >> lane) & 1 ? a[lane] : b[lane]; });
  return Outcome::done;
}

template <int kOperation>  // 0 mov, 1 not, 2 and, 3 or, 4 xor
Outcome combine_predicates(Warp& warp, const Instruction& i, LaneMask mask) {
  LaneMask value = warp.read_predicate(i.operands[1]);
  if (kOperation == 1) value = ~value;
  if (kOperation == 2) value &= warp.read_predicate(i.operands[2]);
  if (kOperation == 3) value |= warp.read_predicate(i.operands[2]);
  if (kOperation == 4) value ^= warp.read_predicate(i.operands[2]);
  warp.write_predicate(i.operands[0], mask, value);
  return Outcome::done;
}

}  // namespace

bool decode_comparison(const Written& written, Instruction& instruction) {
  const std::string_view op = written.opcode[0];
  const std::string_view type = written.last();
  Execute& execute = instruction.execute;
  if (op == "setp") {
    instruction.first_source = static_cast<std::uint16_t>(written.operands[0].size());
    instruction.variant = written.has("and")   ? 1
                          : written.has("or")  ? 2
                          : written.has("xor") ? 3
                                               : 0;
    with_type(type, [&](auto t) { execute = comparison_of<decltype(t)>(written.opcode[1]); });
  } else if (op == "selp") {
    with_type(type, [&](auto t) { execute = select<decltype(t)>; });
  } else if (type == "pred") {
    if (op == "mov") execute = combine_predicates<0>;
    if (op == "not") execute = combine_predicates<1>;
    if (op == "and") execute = combine_predicates<2>;
    if (op == "or") execute = combine_predicates<3>;
    if (op == "xor") execute = combine_predicates<4>;
  }
  return execute != nullptr;
}

}  // namespace winnow::emulator
