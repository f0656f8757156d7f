// SPDX-License-Identifier: Apache-2.0
// The program's operator new: its std::bad_alloc says how much memory was asked for.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdlib>
#include <new>
#include <string>

#include <fmt/format.h>

#include "tools/text.h"

namespace {

class OutOfMemory : public std::bad_alloc {
 public:
  explicit OutOfMemory(std::size_t bytes) {
    const std::string size = winnow::tools::bytes_text(static_cast<double>(bytes));
    const auto end = fmt::format_to_n(text_.data(), text_.size() - 1,
                                      "out of memory: there are no {} left", size);
    *end.out = '\0';
  }
  const char* what() const noexcept override { return text_.data(); }

 private:
  std::array<char, 64> text_;  // no string, which would ask for memory
};

}  // namespace

void* operator new(std::size_t bytes) {
  if (void* const memory = std::malloc(std::max<std::size_t>(bytes, 1))) return memory;
  throw OutOfMemory(bytes);
}

void* operator new(std::size_t bytes, std::align_val_t alignment) {
  void* memory = nullptr;
  if (posix_memalign(&memory, static_cast<std::size_t>(alignment), bytes) == 0) return memory;
  throw OutOfMemory(bytes);
}

// Inlined into a caller, free would not seem to belong to operator new (-Wmismatched-new-delete).
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { operator delete(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { operator delete(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept {
  operator delete(memory);
}
