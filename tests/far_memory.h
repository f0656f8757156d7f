// SPDX-License-Identifier: Apache-2.0
// Tensors with element offsets past 2^31, of which only a few pages are ever touched.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include <sys/mman.h>

#include "harness/device_memory.h"
#include "tests/testing.h"

namespace winnow::tests {

/// A reserved address range. On the host only pages that are written to take memory; they are
/// initially zero.
class FarMemory {
 public:
  FarMemory(Device device, std::size_t bytes) : device_(device), bytes_(bytes) {
    if (device.kind == DeviceKind::cuda) {
      data_ = harness::allocate_on_cuda(device.index, bytes);
      return;
    }
    data_ = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (data_ == MAP_FAILED) data_ = nullptr;
  }
  FarMemory(const FarMemory&) = delete;
  FarMemory& operator=(const FarMemory&) = delete;
  ~FarMemory() {
    if (data_ == nullptr) return;
    device_.kind == DeviceKind::cuda ? harness::free_on_cuda(device_.index, data_)
                                     : static_cast<void>(munmap(data_, bytes_));
  }
  explicit operator bool() const { return data_ != nullptr; }
  char* data() const { return static_cast<char*>(data_); }

 private:
  Device device_;
  std::size_t bytes_;
  void* data_ = nullptr;
};

inline void copy(Device device, void* to, const void* from, std::size_t bytes) {
  if (device.kind == DeviceKind::cuda)
    return harness::copy_with_cuda(device.index, to, from, bytes);
  std::memcpy(to, from, bytes);
}

/// A copy of `near` with a row stride so large that the last row is past 2^31 elements.
class FarTensor {
 public:
  explicit FarTensor(const Tensor& near)
      : near_(near),
        stride_((std::int64_t{1} << 31) / (near.shape[0] - 1) + 8),
        row_bytes_(static_cast<std::size_t>(near.stride[0] * element_bytes(near.dtype))),
        memory_(near.device,
                static_cast<std::size_t>(stride_ * near.shape[0] * element_bytes(near.dtype))) {
    if (memory_) transfer(true);
  }
  explicit operator bool() const { return bool(memory_); }
  Tensor tensor() const {
    Tensor view = near_;
    view.data = memory_.data();
    view.stride[0] = stride_;
    return view;
  }
  /// Copies the rows back to `near`.
  void download_all() const { transfer(false); }

 private:
  void transfer(bool out) const {
    for (std::int64_t i = 0; i < near_.shape[0]; ++i) {
      char* const near = static_cast<char*>(near_.data) + i * static_cast<std::int64_t>(row_bytes_);
      char* const far = memory_.data() + i * stride_ * element_bytes(near_.dtype);
      copy(near_.device, out ? far : near, out ? near : far, row_bytes_);
    }
  }

  Tensor near_;
  std::int64_t stride_;
  std::size_t row_bytes_;
  FarMemory memory_;
};

}  // namespace winnow::tests
