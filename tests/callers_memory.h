// SPDX-License-Identifier: Apache-2.0
// CallersMemory: what the allocator of an Execution gives a call for its workspace.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "tests/testing.h"

namespace winnow::tests {

/// Memory of one device, as a caller's allocator gives it.
struct CallersMemory {
  Device device;
  std::size_t shift = 0;  // bytes between the memory and what is given
  bool exhausted = false;
  std::vector<std::size_t> asked{};
  std::vector<Buffer> given{};

  static void* allocate(void* context, std::size_t bytes) {
    auto& memory = *static_cast<CallersMemory*>(context);
    memory.asked.push_back(bytes);
    if (memory.exhausted) return nullptr;
    const auto words = static_cast<std::int64_t>((bytes + memory.shift + 3) / 4);
    Buffer& buffer = memory.given.emplace_back(memory.device, DType::i32, Shape{words});
    return static_cast<std::byte*>(buffer.tensor().data) + memory.shift;
  }
  bool canaries_intact() const {
    return std::all_of(given.begin(), given.end(),
                       [](const Buffer& buffer) { return buffer.canaries_intact(); });
  }
};

}  // namespace winnow::tests
