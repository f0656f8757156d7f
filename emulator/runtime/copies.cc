// SPDX-License-Identifier: Apache-2.0
// Copies and fills.
#include <cstring>
#include <memory>

#include "emulator/runtime/capture.h"
#include "emulator/runtime/device.h"
#include "emulator/runtime/errors.h"

namespace winnow::emulator {
namespace {

/// Whether the device knows the memory; bytes beyond its end are refused.
bool is_known(const void* address, std::size_t bytes) {
  require(address != nullptr);
  const Memory::Range range = LockedGpu()->memory.find(address);
  if (range.begin == nullptr) return false;
  require(bytes <= static_cast<std::size_t>(range.end - static_cast<const std::byte*>(address)));
  return true;
}

struct Places {
  bool to_known, from_known;
};
Places check(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind) {
  require(kind >= cudaMemcpyHostToHost && kind <= cudaMemcpyDefault);
  const Places places{is_known(to, bytes), is_known(from, bytes)};
  const bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
  const bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
  require((places.to_known || !to_device) && (places.from_known || !from_device));
  return places;
}

/// As the runtime does: a copy from pageable memory of the host has read it when the call returns,
/// one to it has been done.
void copy(const std::shared_ptr<Stream>& stream, void* to, const void* from, std::size_t bytes,
          cudaMemcpyKind kind) {
  if (bytes == 0) return;
  const Places places = check(to, from, bytes, kind);
  constexpr std::size_t kStaged = 64 * 1024;
  const bool pageable = !places.from_known || !places.to_known;
  if (!is_capturing(stream) && places.to_known && !places.from_known && bytes <= kStaged) {
    const std::shared_ptr<std::byte[]> staged(new std::byte[bytes]);
    std::memcpy(staged.get(), from, bytes);
    enqueue(stream, {.run = [=] { std::memcpy(to, staged.get(), bytes); }});
    return;
  }
  const Ticket ticket = enqueue(stream, {.run = [=] { std::memmove(to, from, bytes); }});
  if (pageable) wait_for(ticket);  // null if it is captured
}

}  // namespace
}  // namespace winnow::emulator

using namespace winnow::emulator;

cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind) {
  return call([&] {
    refuse_while_capturing();
    const std::shared_ptr<Stream> stream = find_stream(nullptr);
    copy(stream, to, from, bytes, kind);
    wait_for(submit(stream, nullptr));
  });
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  return call([&] { copy(find_stream(stream), to, from, bytes, kind); });
}

cudaError_t cudaMemsetAsync(void* to, int value, std::size_t bytes, cudaStream_t stream) {
  return call([&] {
    if (bytes == 0) return;
    require(is_known(to, bytes));
    enqueue(find_stream(stream), {.run = [=] { std::memset(to, value, bytes); }});
  });
}
