// SPDX-License-Identifier: Apache-2.0
// How much memory the program asks for. Replaces operator new and delete of the program, so that
// one file of it includes this.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <new>

#include <malloc.h>

namespace {

std::atomic<std::size_t> live_bytes = 0;
std::atomic<std::size_t> peak_bytes = 0;

void* counted(void* memory) {
  if (memory == nullptr) throw std::bad_alloc();
  const std::size_t now = live_bytes += malloc_usable_size(memory);
  std::size_t peak = peak_bytes;
  while (peak < now && !peak_bytes.compare_exchange_weak(peak, now)) {
  }
  return memory;
}

// Inlined into a caller, free would not seem to belong to operator new (-Wmismatched-new-delete).
[[gnu::noinline]] void release(void* memory) noexcept {
  if (memory != nullptr) live_bytes -= malloc_usable_size(memory);
  std::free(memory);
}

}  // namespace

void* operator new(std::size_t n) { return counted(std::malloc(std::max<std::size_t>(n, 1))); }
void* operator new(std::size_t n, std::align_val_t alignment) {
  const auto step = static_cast<std::size_t>(alignment);
  return counted(std::aligned_alloc(step, (n + step) / step * step));
}
void operator delete(void* memory) noexcept { release(memory); }
void operator delete(void* memory, std::size_t) noexcept { release(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { release(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { release(memory); }

namespace winnow::tests {
namespace {

/// The largest amount of memory that `function` held beside what there was before.
template <class Function>
std::size_t most_memory_of(const Function& function) {
  const std::size_t before = live_bytes;
  peak_bytes = before;
  function();
  return peak_bytes - before;
}

}  // namespace
}  // namespace winnow::tests
