// SPDX-License-Identifier: Apache-2.0
// What stands in a PTX text, and how one of its functions becomes instructions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>

#include "emulator/function.h"
#include "emulator/ptx_reader.h"

namespace winnow::emulator {

struct ModuleText {
  struct Shared {
    std::uint32_t address = 0;
    bool is_dynamic = false;
  };

  std::string ptx;
  std::map<std::string_view, Body, std::less<>> entries, functions;
  std::map<std::string_view, Shared, std::less<>> shared;
  std::map<std::string_view, std::byte*, std::less<>> variables;  // .global, .const
  std::size_t static_shared_bytes = 0;
  std::size_t dynamic_alignment = 16;
};

/// Fills `function` with the instructions of an entry, those of the functions that it calls among
/// them. Throws PtxError.
void build_entry(const ModuleText& module, const Body& body, Function& function);

}  // namespace winnow::emulator
