// SPDX-License-Identifier: Apache-2.0
// View<T, rank>: typed element access to a Tensor whose type and rank have been checked.
#pragma once

#include <array>
#include <cassert>
#include <cstdint>

#include "winnow/tensor.h"

namespace winnow {

template <class T, int rank>
class View {
 public:
  /// An absent tensor gives an empty view, which converts to false.
  explicit View(const Tensor& tensor)
      : data_(static_cast<T*>(tensor.data)), present_(bool(tensor)) {
    assert(!present_ || tensor.rank == rank);
    for (int i = 0; i < rank; ++i) stride_[i] = tensor.stride[i];
  }
  explicit operator bool() const { return present_; }

  template <class... Index>
  T& operator()(Index... index) const {
    static_assert(sizeof...(index) == rank);
    std::int64_t offset = 0;
    int i = 0;
    ((offset += static_cast<std::int64_t>(index) * stride_[i++]), ...);
    return data_[offset];
  }

 private:
  T* data_;
  bool present_;
  std::array<std::int64_t, rank> stride_{};
};

/// tensor[index] along the leading dimension; an absent tensor stays absent.
inline Tensor slice(Tensor tensor, std::int64_t index) {
  if (!tensor) return tensor;
  assert(tensor.rank >= 1);
  bool has_elements = true;
  for (int i = 0; i < tensor.rank; ++i) has_elements = has_elements && tensor.shape[i] > 0;
  if (has_elements) {  // else the strides may be anything
    tensor.data =
        static_cast<char*>(tensor.data) + index * tensor.stride[0] * element_bytes(tensor.dtype);
  }
  --tensor.rank;
  for (int i = 0; i < 3; ++i) {
    tensor.shape[i] = tensor.shape[i + 1];
    tensor.stride[i] = tensor.stride[i + 1];
  }
  return tensor;
}

}  // namespace winnow
