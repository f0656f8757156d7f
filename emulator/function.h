// SPDX-License-Identifier: Apache-2.0
// A kernel's PTX in the form that is run: instructions with their operands resolved to places in
// the register file of a warp.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "emulator/gpu.h"

namespace winnow::emulator {

inline constexpr int kLanes = 32;
using LaneMask = std::uint32_t;
inline constexpr LaneMask kAllLanes = 0xffffffffu;

/// An immediate, once for each lane, so that it reads like a register.
struct Constant {
  std::array<std::uint64_t, kLanes> wide;
  std::array<std::uint32_t, kLanes> narrow;
};

/// The special registers, by their names in PTX.
enum class Special : std::uint8_t {
  tid_x,
  tid_y,
  tid_z,
  ntid_x,
  ntid_y,
  ntid_z,
  ctaid_x,
  ctaid_y,
  ctaid_z,
  nctaid_x,
  nctaid_y,
  nctaid_z,
  laneid,
  warpid,
  lanemask_lt,
  lanemask_le,
  lanemask_gt,
  lanemask_ge,
  lanemask_eq,
  cluster_ctarank,
  cluster_nctarank,
  smid,
  clock,
  clock64,
  globaltimer
};

struct Operand {
  enum class Kind : std::uint8_t {
    none,
    reg,        // `offset` in the register file, `bytes` a lane
    predicate,  // `offset` in the predicates
    constant,
    special,
    parameter,  // the address of `value` bytes into the kernel's parameters
    call_slot,  // the address of `value` bytes into each lane's own memory for calls
    label,      // `value`: the instruction's index
  };
  Kind kind = Kind::none;
  bool negated = false;  // of a predicate
  std::uint8_t bytes = 0;
  std::uint32_t offset = 0;
  std::int64_t value = 0;         // of a constant; otherwise see Kind
  std::int64_t displacement = 0;  // of an address: [base + displacement]
  const Constant* constant = nullptr;
};

class Warp;
struct Instruction;

/// What became of an instruction.
enum class Outcome : std::uint8_t {
  done,     // go on with the next one
  yield,    // the same, but let others run first: it may be a loop that waits
  blocked,  // try again later
  jumped,   // it has set the lanes' places itself
};
using Execute = Outcome (*)(Warp&, const Instruction&, LaneMask);

struct Instruction {
  Execute execute = nullptr;
  const Operand* operands = nullptr;
  std::uint16_t count = 0;         // of operands
  std::uint16_t first_source = 1;  // where a vector of destinations ends
  std::int32_t guard = -1;         // a predicate
  bool guard_negated = false;
  bool is_aligned = false;     // all lanes of the warp execute it together
  bool has_lane_mask = false;  // the last operand names the lanes that execute it together
  std::int64_t variant = 0;    // the instruction's own: a shape, a comparison
  std::uint32_t line = 0;
  std::string_view text;  // as it is written; of a call: the name
};

struct Function {
  std::string name;
  FunctionInfo info;
  std::vector<Instruction> code;
  std::size_t register_bytes = 0;  // of a warp
  std::size_t predicates = 0;
  std::size_t call_bytes = 0;  // of a lane

  // What instructions point to.
  std::vector<std::unique_ptr<std::vector<Operand>>> operands;
  std::vector<std::unique_ptr<Constant>> constants;
};

/// An instruction as it is written: "add.s32" is {"add", "s32"}, each operand a list, of one
/// element unless it is a vector in braces. An address with coordinates is a list that begins with
/// it.
struct Written {
  std::vector<std::string_view> opcode;
  std::vector<std::vector<Operand>> operands;
  /// Whether a part of the opcode after the first is `part`.
  bool has(std::string_view part) const {
    for (std::size_t i = 1; i < opcode.size(); ++i) {
      if (opcode[i] == part) return true;
    }
    return false;
  }
  std::string_view last() const { return opcode.back(); }
};

/// Each finds what executes an instruction, and sets its variant; false if it is not one of theirs.
bool decode_arithmetic(const Written& written, Instruction& instruction);
bool decode_bits(const Written& written, Instruction& instruction);
bool decode_comparison(const Written& written, Instruction& instruction);
bool decode_conversion(const Written& written, Instruction& instruction);
bool decode_access(const Written& written, Instruction& instruction);
bool decode_control(const Written& written, Instruction& instruction);
bool decode_exchange(const Written& written, Instruction& instruction);
bool decode_barrier(const Written& written, Instruction& instruction);
bool decode_tensor_core(const Written& written, Instruction& instruction);
bool decode_async_copy(const Written& written, Instruction& instruction);

}  // namespace winnow::emulator
