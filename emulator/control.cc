// SPDX-License-Identifier: Apache-2.0
// Branches and ends. Calls are gone by now: functions are written out where they are called.
#include "emulator/lanes.h"

namespace winnow::emulator {
namespace {

Outcome branch(Warp& warp, const Instruction& i, LaneMask mask) {
  const auto target = static_cast<std::uint32_t>(i.operands[0].value);
  for_lanes(mask, [&](int lane) { warp.pc[lane] = target; });
  return Outcome::jumped;
}

Outcome end(Warp& warp, const Instruction&, LaneMask mask) {
  warp.live &= ~mask;
  return Outcome::jumped;
}

Outcome trap(Warp& warp, const Instruction&, LaneMask mask) { warp.fail("trap", first_lane(mask)); }

/// A function of the runtime: call (name), with its arguments of 8 bytes in the lane's own memory.
Outcome call_runtime(Warp& warp, const Instruction& i, LaneMask mask) {
  const auto found = warp.block.grid.gpu.device_calls.find(i.text);
  if (found == warp.block.grid.gpu.device_calls.end()) warp.fail("a call of an unknown function");
  for_lanes(mask, [&](int lane) {
    std::vector<std::uint64_t> arguments;
    for (int k = 0; k < i.count; ++k) {
      std::uint64_t value = 0;
      if (i.operands[k].bytes > sizeof value) warp.fail("an argument of more than 8 bytes", lane);
      std::memcpy(&value, reinterpret_cast<const void*>(warp.address(i.operands[k], lane)),
                  static_cast<std::size_t>(i.operands[k].bytes));
      arguments.push_back(value);
    }
    found->second(arguments);
  });
  return Outcome::done;
}

}  // namespace

bool decode_control(const Written& written, Instruction& instruction) {
  const std::string_view op = written.opcode[0];
  if (op == "bra") instruction.execute = branch;
  if (op == "ret" || op == "exit") instruction.execute = end;
  if (op == "trap") instruction.execute = trap;
  if (op == "call") instruction.execute = call_runtime;
  return instruction.execute != nullptr;
}

}  // namespace winnow::emulator
