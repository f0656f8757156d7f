// SPDX-License-Identifier: Apache-2.0
// Allocations that fail when a test says so. Replaces operator new and delete of the program, so
// that one file of it includes this.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <new>

#include "tests/testing.h"

namespace {

constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();

std::atomic<std::int64_t> left = kNever;   // allocations that succeed before one fails
std::atomic<bool> all_after_fail = false;  // or that one alone
std::atomic<std::int64_t> failed = 0;
std::atomic<std::int64_t> live = 0;  // allocations that have not been freed

bool fails() {
  const std::int64_t before = left.fetch_sub(1);
  if (before > 0 || (before < 0 && !all_after_fail)) return false;
  ++failed;
  return true;
}

void* allocate(std::size_t bytes, std::size_t alignment) noexcept {
  if (fails()) return nullptr;
  const std::size_t rounded = (bytes + alignment) / alignment * alignment;  // never 0
  void* const memory = std::aligned_alloc(alignment, rounded);
  if (memory != nullptr) ++live;
  return memory;
}

void* allocate_or_throw(std::size_t bytes, std::size_t alignment) {
  void* const memory = allocate(bytes, alignment);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

void deallocate(void* memory) noexcept {
  if (memory == nullptr) return;
  --live;
  std::free(memory);
}

constexpr std::size_t kUsual = __STDCPP_DEFAULT_NEW_ALIGNMENT__;

}  // namespace

using Alignment = std::align_val_t;
using Quiet = std::nothrow_t;

void* operator new(std::size_t n) { return allocate_or_throw(n, kUsual); }
void* operator new[](std::size_t n) { return allocate_or_throw(n, kUsual); }
void* operator new(std::size_t n, Alignment a) { return allocate_or_throw(n, std::size_t(a)); }
void* operator new[](std::size_t n, Alignment a) { return allocate_or_throw(n, std::size_t(a)); }
void* operator new(std::size_t n, const Quiet&) noexcept { return allocate(n, kUsual); }
void* operator new[](std::size_t n, const Quiet&) noexcept { return allocate(n, kUsual); }
void operator delete(void* p) noexcept { deallocate(p); }
void operator delete[](void* p) noexcept { deallocate(p); }
void operator delete(void* p, std::size_t) noexcept { deallocate(p); }
void operator delete[](void* p, std::size_t) noexcept { deallocate(p); }
void operator delete(void* p, Alignment) noexcept { deallocate(p); }
void operator delete[](void* p, Alignment) noexcept { deallocate(p); }
void operator delete(void* p, std::size_t, Alignment) noexcept { deallocate(p); }
void operator delete[](void* p, std::size_t, Alignment) noexcept { deallocate(p); }
void operator delete(void* p, const Quiet&) noexcept { deallocate(p); }
void operator delete[](void* p, const Quiet&) noexcept { deallocate(p); }

namespace winnow::tests {
namespace {

enum class Outcome { done, refused, out_of_memory, escaped };

/// Calls `function` while its n-th allocation fails, from 0 on.
template <class Function>
Outcome outcome_of(const Function& function, std::int64_t n) {
  Outcome outcome = Outcome::done;
  failed = 0;
  left = n;
  try {
    function();
  } catch (const Error& error) {
    outcome = error.code() == ErrorCode::out_of_memory ? Outcome::out_of_memory : Outcome::refused;
  } catch (...) {
    outcome = Outcome::escaped;
  }
  left = kNever;
  return outcome;
}

/// Fails each allocation of `function` in turn, alone and with all that follow, until it makes no
/// more of them; that last call has the outcome `expected`. Calls after() behind every call. Gives
/// how many calls ran out of memory.
template <class Function, class After>
int fail_each_allocation(const Function& function, Outcome expected, const After& after) {
  constexpr std::int64_t kMost = 1000;
  int caught = 0;
  for (const bool all_after : {false, true}) {
    all_after_fail = all_after;
    for (std::int64_t n = 0; n < kMost; ++n) {
      SCOPED_TRACE(fmt::format("allocation {}{}", n, all_after ? " and all behind it" : ""));
      outcome_of(function, n);  // what is made once is made here
      after();
      const std::int64_t live_before = live;
      const Outcome outcome = outcome_of(function, n);
      EXPECT_EQ(live, live_before) << "memory was kept";
      after();
      EXPECT_NE(outcome, Outcome::escaped) << "what came out is no Error";
      if (failed == 0) {
        EXPECT_EQ(outcome, expected);
        break;
      }
      if (outcome == Outcome::out_of_memory) ++caught;
      EXPECT_LT(n + 1, kMost) << "it never ends";
    }
  }
  return caught;
}

template <class Function>
int fail_each_allocation(const Function& function, Outcome expected = Outcome::done) {
  return fail_each_allocation(function, expected, [] {});
}

}  // namespace
}  // namespace winnow::tests
