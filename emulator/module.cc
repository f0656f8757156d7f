// SPDX-License-Identifier: Apache-2.0
// The functions and variables of a PTX text.
#include <algorithm>
#include <cstring>

#include "emulator/function_builder.h"
#include "emulator/warp.h"

namespace winnow::emulator {
namespace {

void read_shared(Reader& reader, ModuleText& text) {
  const Declared declared = read_declaration(reader);
  reader.expect(';');
  if (declared.is_array_without_size) {
    text.shared[declared.name] = {0, true};
    text.dynamic_alignment = std::max(text.dynamic_alignment, declared.alignment);
    return;
  }
  text.static_shared_bytes = align_up(text.static_shared_bytes, declared.alignment);
  text.shared[declared.name] = {kSharedBegin + static_cast<std::uint32_t>(text.static_shared_bytes),
                                false};
  text.static_shared_bytes += declared.bytes;
}

/// A variable in device memory, with its bytes if they are given.
void read_variable(Reader& reader, ModuleText& text) {
  const Declared declared = read_declaration(reader);
  auto* const data = static_cast<std::byte*>(
      Gpu::instance().memory.allocate(std::max<std::size_t>(declared.bytes, 1)));
  std::memset(data, 0, declared.bytes);
  text.variables[declared.name] = data;
  if (reader.take('=')) {
    reader.take('{');
    const std::size_t element = declared.element_bytes;
    for (std::size_t at = 0; reader.peek() != '}' && reader.peek() != ';'; at += element) {
      const std::int64_t value = read_number(reader.word("-"));
      if (at + element > declared.bytes) reader.fail("too many values of a variable");
      std::memcpy(data + at, &value, element);
      reader.take(',');
    }
    reader.take('}');
  }
  reader.expect(';');
}

}  // namespace

Module::Module(std::string_view ptx) : text_(std::make_unique<ModuleText>()) {
  ModuleText& text = *text_;
  text.ptx = ptx;
  Reader reader(text.ptx, 0, 1);
  while (!reader.ended()) {
    reader.expect('.');
    std::string_view what = reader.word();
    while (what == "visible" || what == "weak" || what == "extern" || what == "common") {
      reader.expect('.');
      what = reader.word();
    }
    if (what == "version" || what == "target" || what == "address_size") {
      reader.word(".,");
      while (reader.take(',')) reader.word();
    } else if (what == "file") {
      reader.skip_line();
    } else if (what == "section") {
      reader.until('{');
      reader.skip_braces();
    } else if (what == "shared") {
      read_shared(reader, text);
    } else if (what == "global" || what == "const") {
      read_variable(reader, text);
    } else if (what == "entry" || what == "func") {
      NamedBody function = read_function(reader);
      if (function.body.is_declared_only) continue;
      (what == "entry" ? text.entries : text.functions)[function.name] = std::move(function.body);
    } else {
      reader.fail("directive ." + std::string(what));
    }
  }
}

Module::~Module() {
  for (const auto& [name, data] : text_->variables) {
    Gpu::instance().memory.free(data);
  }
}

const Function* Module::find(std::string_view name) const {
  if (const auto found = functions_.find(name); found != functions_.end()) {
    return found->second.get();
  }
  const auto body = text_->entries.find(name);
  if (body == text_->entries.end()) return nullptr;
  auto function = std::make_unique<Function>();
  function->name = name;
  build_entry(*text_, body->second, *function);
  return functions_.emplace(std::string(name), std::move(function)).first->second.get();
}

void* Module::variable(std::string_view name) const {
  const auto found = text_->variables.find(name);
  return found == text_->variables.end() ? nullptr : found->second;
}

const FunctionInfo& info(const Function& function) { return function.info; }

}  // namespace winnow::emulator
