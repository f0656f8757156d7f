// SPDX-License-Identifier: Apache-2.0
// The program's operator new: its std::bad_alloc says how much memory was asked for. Linux promises
// more memory than there is, and kills a program that uses it; so here a large request is compared
// with what is left.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <new>
#include <optional>
#include <string>

#include <fmt/format.h>

#include "tools/text.h"

namespace {

constexpr std::size_t kLargeBytes = std::size_t{64} << 20;    // to look costs some microseconds
constexpr std::size_t kSparedBytes = std::size_t{256} << 20;  // for smaller requests

std::string size_text(std::size_t bytes) {
  return winnow::tools::bytes_text(static_cast<double>(bytes));
}

class OutOfMemory : public std::bad_alloc {
 public:
  explicit OutOfMemory(std::size_t needed, std::optional<std::size_t> left = {}) {
    const std::size_t room = text_.size() - 1;
    const auto end =
        left ? fmt::format_to_n(text_.data(), room, "out of memory: {} are needed, {} are left",
                                size_text(needed), size_text(*left))
             : fmt::format_to_n(text_.data(), room, "out of memory: there are no {} left",
                                size_text(needed));
    *end.out = '\0';
  }
  const char* what() const noexcept override { return text_.data(); }

 private:
  std::array<char, 64> text_;  // no string, which would ask for memory
};

/// Memory that programs can still use, with what the swap can still take; none where the kernel
/// does not say. The limit of a container is not looked at: its page cache counts as used there.
std::optional<std::size_t> available_bytes() {
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen("/proc/meminfo", "r"),
                                                             std::fclose);
  std::array<char, 128> line;
  std::optional<std::size_t> available;
  std::size_t kib = 0;
  while (file && std::fgets(line.data(), line.size(), file.get()) != nullptr) {
    if (std::sscanf(line.data(), "MemAvailable: %zu kB", &kib) == 1) available = kib << 10;
    if (available && std::sscanf(line.data(), "SwapFree: %zu kB", &kib) == 1)
      return *available + (kib << 10);  // which stands behind MemAvailable
  }
  return available;
}

void refuse_what_would_not_fit(std::size_t bytes) {
  if (bytes < kLargeBytes) return;
  const std::optional<std::size_t> available = available_bytes();
  if (!available) return;
  const std::size_t left = *available - std::min(*available, kSparedBytes);
  if (bytes > left) throw OutOfMemory(bytes, left);
}

}  // namespace

void* operator new(std::size_t bytes) {
  refuse_what_would_not_fit(bytes);
  if (void* const memory = std::malloc(std::max<std::size_t>(bytes, 1))) return memory;
  throw OutOfMemory(bytes);
}

void* operator new(std::size_t bytes, std::align_val_t alignment) {
  refuse_what_would_not_fit(bytes);
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
