// SPDX-License-Identifier: Apache-2.0
// How the text of a function becomes instructions.
#include "emulator/function_builder.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <memory>
#include <optional>
#include <unordered_map>
#include <utility>

#include "emulator/warp.h"

namespace winnow::emulator {
namespace {

std::optional<Special> special_of(std::string_view name) {
  static const std::unordered_map<std::string_view, Special> kNames = {
      {"%tid.x", Special::tid_x},
      {"%tid.y", Special::tid_y},
      {"%tid.z", Special::tid_z},
      {"%ntid.x", Special::ntid_x},
      {"%ntid.y", Special::ntid_y},
      {"%ntid.z", Special::ntid_z},
      {"%ctaid.x", Special::ctaid_x},
      {"%ctaid.y", Special::ctaid_y},
      {"%ctaid.z", Special::ctaid_z},
      {"%nctaid.x", Special::nctaid_x},
      {"%nctaid.y", Special::nctaid_y},
      {"%nctaid.z", Special::nctaid_z},
      {"%laneid", Special::laneid},
      {"%warpid", Special::warpid},
      {"%lanemask_lt", Special::lanemask_lt},
      {"%lanemask_le", Special::lanemask_le},
      {"%lanemask_gt", Special::lanemask_gt},
      {"%lanemask_ge", Special::lanemask_ge},
      {"%lanemask_eq", Special::lanemask_eq},
      {"%cluster_ctarank", Special::cluster_ctarank},
      {"%cluster_nctarank", Special::cluster_nctarank},
      {"%smid", Special::smid},
      {"%clock", Special::clock},
      {"%clock64", Special::clock64},
      {"%globaltimer", Special::globaltimer}};
  const auto found = kNames.find(name);
  if (found == kNames.end()) return std::nullopt;
  return found->second;
}

/// Writes one function, and those that it calls, as instructions.
class Builder {
 public:
  Builder(const ModuleText& module, Function& function)
      : module_(module), function_(function), static_shared_(module.static_shared_bytes) {}

  void build_entry(const Body& body) {
    scopes_.emplace_back();
    std::size_t offset = 0;
    for (const Declared& each : body.parameters) {
      offset = align_up(offset, each.alignment);
      function_.info.parameter_offsets.push_back(offset);
      function_.info.parameter_bytes.push_back(each.bytes);
      Operand place;
      place.kind = Operand::Kind::parameter;
      place.value = static_cast<std::int64_t>(offset);
      scopes_.back().symbols[each.name] = place;
      offset += each.bytes;
    }
    function_.info.all_parameter_bytes = offset;
    function_.info.max_threads = body.max_threads;
    function_.info.cluster = body.cluster;
    read_body(body);
    close_scope();
    // A function may end without ret.
    emit_simple("ret");
    function_.info.static_shared_bytes = static_shared_;
    function_.register_bytes = registers_;
    function_.predicates = predicates_;
    function_.call_bytes = align_up(call_bytes_, 16);
  }

 private:
  struct Family {  // .reg .b32 %r<523>
    std::uint32_t first = 0;
    std::uint32_t count = 0;
    std::uint8_t bytes = 0;  // 0: predicates
  };
  struct Fixup {
    std::string_view label;
    std::size_t instruction;
  };
  struct Scope {
    std::unordered_map<std::string_view, Family> registers;
    std::unordered_map<std::string_view, Operand> symbols;
    std::unordered_map<std::string_view, std::int64_t> labels;
    std::vector<Fixup> fixups;
    bool is_function = false;  // names of the caller end here
  };

  [[noreturn]] void fail(const Reader& reader, const std::string& what) const {
    reader.fail(function_.name + ": " + what);
  }

  void close_scope() {
    Scope scope = std::move(scopes_.back());
    scopes_.pop_back();
    for (const Fixup& fixup : scope.fixups) {
      const auto found = scope.labels.find(fixup.label);
      if (found != scope.labels.end()) {
        set_target(fixup.instruction, found->second);
      } else if (!scopes_.empty() && !scope.is_function) {
        scopes_.back().fixups.push_back(fixup);
      } else {
        throw PtxError(function_.name + ": no label " + std::string(fixup.label));
      }
    }
  }

  void set_target(std::size_t instruction, std::int64_t target) {
    const_cast<Operand*>(function_.code[instruction].operands)->value = target;
  }

  void read_body(const Body& body) {
    Reader reader(module_.ptx, body.at, body.line);
    reader.expect('{');
    int depth = 1;
    while (depth > 0) {
      if (reader.ended()) fail(reader, "the function does not end");
      if (reader.take('{')) {
        scopes_.emplace_back();
        ++depth;
      } else if (reader.take('}')) {
        if (--depth > 0) close_scope();
      } else if (reader.peek() == '.') {
        read_directive(reader);
      } else {
        read_statement(reader);
      }
    }
  }

  void read_directive(Reader& reader) {
    reader.expect('.');
    const std::string_view what = reader.word();
    if (what == "reg") {
      reader.expect('.');
      const std::size_t bytes = bytes_of_type(reader.word());
      do {
        declare_registers(reader, bytes == 0 ? 0 : bytes == 8 ? 8 : 4);
      } while (reader.take(','));
    } else if (what == "param") {
      const Declared declared = read_declaration(reader);
      call_bytes_ = align_up(call_bytes_, std::max<std::size_t>(declared.alignment, 8));
      Operand place;
      place.kind = Operand::Kind::call_slot;
      place.bytes = static_cast<std::uint8_t>(std::min<std::size_t>(declared.bytes, 255));
      place.value = static_cast<std::int64_t>(call_bytes_);
      call_bytes_ += declared.bytes;
      scopes_.back().symbols[declared.name] = place;
    } else if (what == "shared") {
      const Declared declared = read_declaration(reader);
      if (uses_dynamic_) fail(reader, "shared memory is declared behind the use of dynamic one");
      static_shared_ = align_up(static_shared_, declared.alignment);
      scopes_.back().symbols[declared.name] =
          constant(kSharedBegin + static_cast<std::int64_t>(static_shared_));
      static_shared_ += declared.bytes;
    } else if (what == "pragma") {
      reader.until(';');
    } else if (what == "loc" || what == "file") {
      reader.skip_line();
    } else {
      fail(reader, "directive ." + std::string(what));
    }
    reader.take(';');
  }

  void declare_registers(Reader& reader, std::uint8_t bytes) {
    const std::string_view name = reader.word();
    Family family{.bytes = bytes};
    std::size_t count = 1;
    if (reader.take('<')) {
      count = reader.count();
      reader.expect('>');
    }
    family.count = static_cast<std::uint32_t>(count);
    if (bytes == 0) {
      family.first = static_cast<std::uint32_t>(predicates_);
      predicates_ += count;
    } else {
      registers_ = align_up(registers_, 64);
      family.first = static_cast<std::uint32_t>(registers_);
      registers_ += count * bytes * kLanes;
    }
    scopes_.back().registers[name] = family;
  }

  Operand constant(std::int64_t value) {
    const Constant*& found = constants_[value];
    if (found == nullptr) {
      auto made = std::make_unique<Constant>();
      made->wide.fill(static_cast<std::uint64_t>(value));
      made->narrow.fill(static_cast<std::uint32_t>(value));
      found = made.get();
      function_.constants.push_back(std::move(made));
    }
    Operand operand;
    operand.kind = Operand::Kind::constant;
    operand.value = value;
    operand.constant = found;
    return operand;
  }

  static Operand register_of(const Family& family, std::uint32_t index) {
    Operand operand;
    if (family.bytes == 0) {
      operand.kind = Operand::Kind::predicate;
      operand.offset = family.first + index;
    } else {
      operand.kind = Operand::Kind::reg;
      operand.bytes = family.bytes;
      operand.offset = family.first + index * family.bytes * kLanes;
    }
    return operand;
  }

  std::optional<Operand> find_name(std::string_view name) {
    std::size_t digits = name.size();
    while (digits > 0 && std::isdigit(static_cast<unsigned char>(name[digits - 1]))) --digits;
    std::uint32_t index = 0;
    std::from_chars(name.data() + digits, name.data() + name.size(), index);
    for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope) {
      if (const auto found = scope->symbols.find(name); found != scope->symbols.end()) {
        return found->second;
      }
      if (const auto found = scope->registers.find(name); found != scope->registers.end()) {
        return register_of(found->second, 0);
      }
      const auto family = scope->registers.find(name.substr(0, digits));
      if (family != scope->registers.end() && digits < name.size()) {
        if (index >= family->second.count) return std::nullopt;
        return register_of(family->second, index);
      }
      if (scope->is_function) break;
    }
    if (const auto found = module_.shared.find(name); found != module_.shared.end()) {
      if (!found->second.is_dynamic) return constant(found->second.address);
      uses_dynamic_ = true;
      static_shared_ = align_up(static_shared_, module_.dynamic_alignment);
      return constant(kSharedBegin + static_cast<std::int64_t>(static_shared_));
    }
    if (const auto found = module_.variables.find(name); found != module_.variables.end()) {
      return constant(reinterpret_cast<std::int64_t>(found->second));
    }
    if (const auto found = special_of(name)) {
      Operand operand;
      operand.kind = Operand::Kind::special;
      operand.value = static_cast<std::int64_t>(*found);
      return operand;
    }
    if (name == "_") return Operand{};
    if (name == "WARP_SZ") return constant(kLanes);
    return std::nullopt;
  }

  Operand read_value(Reader& reader) {
    const bool negated = reader.take('!');
    Operand operand;
    if (reader.peek() == '-' || std::isdigit(static_cast<unsigned char>(reader.peek()))) {
      operand = constant(read_number(reader.word("-")));
    } else {
      const std::string_view name = reader.word(".");
      const auto found = find_name(name);
      if (!found) fail(reader, "unknown name " + std::string(name));
      operand = *found;
    }
    operand.negated = negated;
    if (reader.peek() == '+' || (reader.peek() == '-' && operand.kind != Operand::Kind::constant)) {
      reader.take('+');
      const std::int64_t by = read_number(reader.word("-"));
      if (operand.kind == Operand::Kind::constant) {
        operand = constant(operand.value + by);
      } else {
        operand.displacement += by;
      }
    }
    return operand;
  }

  std::vector<Operand> read_operand(Reader& reader) {
    std::vector<Operand> group;
    if (reader.take('{')) {
      do {
        group.push_back(read_value(reader));
      } while (reader.take(','));
      reader.expect('}');
    } else if (reader.take('[')) {
      group.push_back(read_value(reader));
      if (reader.take(',')) {
        for (Operand& each : read_operand(reader)) group.push_back(each);
      }
      reader.expect(']');
    } else {
      do {
        group.push_back(read_value(reader));
      } while (reader.take('|'));
    }
    return group;
  }

  void read_statement(Reader& reader) {
    const std::size_t begin = reader.at();
    std::int32_t guard = -1;
    bool guard_negated = false;
    if (reader.take('@')) {
      const Operand operand = read_value(reader);
      if (operand.kind != Operand::Kind::predicate) fail(reader, "a guard that is no predicate");
      guard = static_cast<std::int32_t>(operand.offset);
      guard_negated = operand.negated;
    }
    const std::uint32_t line = reader.line();
    std::string_view opcode = reader.word(".:");
    if (opcode.size() > 1 && opcode.back() == ':') {  // a label
      opcode.remove_suffix(1);
      scopes_.back().labels[opcode] = static_cast<std::int64_t>(function_.code.size());
      return;
    }
    Instruction instruction;
    instruction.line = line;
    instruction.guard = guard;
    instruction.guard_negated = guard_negated;
    Written written;
    split(opcode, written.opcode);
    if (written.opcode[0] == "call") {
      read_call(reader, instruction);
      return;
    }
    if (written.opcode[0] == "bra") {
      const std::string_view label = reader.word();
      reader.expect(';');
      emit_branch(instruction, label);
      return;
    }
    if (reader.peek() != ';') {
      do {
        written.operands.push_back(read_operand(reader));
      } while (reader.take(','));
    }
    reader.expect(';');
    instruction.text = reader.since(begin);
    instruction.text = instruction.text.substr(0, instruction.text.find(';'));
    if (written.opcode[0] == "ret" && !returns_.empty()) {
      emit_branch(instruction, returns_.back());
      return;
    }
    decode(written, instruction);
  }

  static void split(std::string_view opcode, std::vector<std::string_view>& parts) {
    while (true) {
      const std::size_t dot = opcode.find('.');
      parts.push_back(opcode.substr(0, dot));
      if (dot == std::string_view::npos) return;
      opcode.remove_prefix(dot + 1);
    }
  }

  void emit_branch(Instruction instruction, std::string_view label) {
    Operand target;
    target.kind = Operand::Kind::label;
    Written written;
    written.opcode = {"bra"};
    decode_control(written, instruction);
    instruction.text = label;
    set_operands(instruction, {target});
    scopes_.back().fixups.push_back({label, function_.code.size()});
    function_.code.push_back(instruction);
  }

  void emit_simple(std::string_view opcode) {
    Written written;
    written.opcode = {opcode};
    Instruction instruction;
    instruction.text = opcode;
    decode_control(written, instruction);
    function_.code.push_back(instruction);
  }

  void set_operands(Instruction& instruction, std::vector<Operand> operands) {
    auto held = std::make_unique<std::vector<Operand>>(std::move(operands));
    instruction.count = static_cast<std::uint16_t>(held->size());
    instruction.operands = held->data();
    function_.operands.push_back(std::move(held));
  }

  void decode(const Written& written, Instruction& instruction) {
    std::vector<Operand> operands;
    for (const auto& group : written.operands) {
      operands.insert(operands.end(), group.begin(), group.end());
    }
    const bool has_hint = written.has("L2::cache_hint");  // which would be one operand more
    const bool found =
        !has_hint &&
        (decode_control(written, instruction) || decode_tensor_core(written, instruction) ||
         decode_async_copy(written, instruction) || decode_barrier(written, instruction) ||
         decode_exchange(written, instruction) || decode_access(written, instruction) ||
         decode_conversion(written, instruction) || decode_comparison(written, instruction) ||
         decode_bits(written, instruction) || decode_arithmetic(written, instruction));
    if (!found) {
      throw PtxError("PTX, line " + std::to_string(instruction.line) + ": " + function_.name +
                     ": unknown instruction " + std::string(instruction.text));
    }
    set_operands(instruction, std::move(operands));
    function_.code.push_back(instruction);
  }

  /// call.uni (result), name, (arguments); the function is written out here.
  void read_call(Reader& reader, Instruction instruction) {
    std::optional<Operand> result;
    if (reader.take('(')) {
      result = read_value(reader);
      reader.expect(')');
      reader.expect(',');
    }
    const std::string_view name = reader.word();
    std::vector<Operand> arguments;
    if (reader.take(',')) {
      reader.expect('(');
      if (reader.peek() != ')') {
        do {
          arguments.push_back(read_value(reader));
        } while (reader.take(','));
      }
      reader.expect(')');
    }
    reader.expect(';');
    const auto callee = module_.functions.find(name);
    if (callee == module_.functions.end()) {
      Written written;
      written.opcode = {"call"};
      decode_control(written, instruction);
      instruction.text = name;
      set_operands(instruction, std::move(arguments));
      function_.code.push_back(instruction);
      return;
    }
    if (instruction.guard >= 0) fail(reader, "a call with a guard");
    if (returns_.size() > 8) fail(reader, "functions that call each other");
    Scope scope;
    scope.is_function = true;
    if (result) scope.symbols[callee->second.result] = *result;
    for (std::size_t i = 0; i < arguments.size(); ++i) {
      scope.symbols[callee->second.parameters[i].name] = arguments[i];
    }
    scopes_.push_back(std::move(scope));
    returns_.push_back("$return");
    read_body(callee->second);
    returns_.pop_back();
    scopes_.back().labels["$return"] = static_cast<std::int64_t>(function_.code.size());
    close_scope();
  }

  const ModuleText& module_;
  Function& function_;
  std::size_t static_shared_;
  bool uses_dynamic_ = false;
  std::vector<Scope> scopes_;
  std::vector<std::string_view> returns_;
  std::unordered_map<std::int64_t, const Constant*> constants_;
  std::size_t registers_ = 0, predicates_ = 0, call_bytes_ = 0;
};

}  // namespace

void build_entry(const ModuleText& module, const Body& body, Function& function) {
  Builder(module, function).build_entry(body);
}

}  // namespace winnow::emulator
