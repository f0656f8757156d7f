// SPDX-License-Identifier: Apache-2.0
// Device memory, which is memory of the host.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

#include "emulator/gpu.h"

namespace winnow::emulator {
namespace {

constexpr std::size_t kAlignment = 256;

}  // namespace

void* Memory::allocate(std::size_t bytes) {
  if (bytes > capacity_ - used_) throw std::bad_alloc();
  // Never empty, so that addresses differ.
  const std::size_t rounded = (bytes + kAlignment) / kAlignment * kAlignment;
  auto* const begin = static_cast<std::byte*>(std::aligned_alloc(kAlignment, rounded));
  if (begin == nullptr) throw std::bad_alloc();
  constexpr int kNoNumber = 0xff;  // NaN in every type of floats, -1 in integers
  std::memset(begin, kNoNumber, bytes);
  blocks_[begin] = {bytes, true};
  used_ += bytes;
  return begin;
}

bool Memory::free(void* address) {
  const auto found = blocks_.find(static_cast<std::byte*>(address));
  if (found == blocks_.end() || !found->second.owned) return false;
  used_ -= found->second.bytes;
  blocks_.erase(found);
  std::free(address);
  return true;
}

Memory::Range Memory::find(const void* address) const {
  auto* const at = static_cast<std::byte*>(const_cast<void*>(address));
  auto found = blocks_.upper_bound(at);
  if (found == blocks_.begin()) return {};
  --found;
  std::byte* const end = found->first + found->second.bytes;
  if (at >= end) return {};
  return {found->first, end};
}

void Memory::add(void* begin, std::size_t bytes) {
  blocks_[static_cast<std::byte*>(begin)] = {bytes, false};
}

void Memory::remove(void* begin) { blocks_.erase(static_cast<std::byte*>(begin)); }

}  // namespace winnow::emulator
