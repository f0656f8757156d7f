// SPDX-License-Identifier: Apache-2.0
// Places tensors of a call elsewhere: with gaps between rows, in the gaps of another, over another.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "tests/call_maker.h"

namespace winnow::tests {

using Bytes = std::vector<std::byte>;

inline Bytes bytes_of(const Buffer& memory) {
  const Ints words = memory.download_ints();
  const auto* const first = reinterpret_cast<const std::byte*>(words.data());
  return {first, first + words.size() * sizeof(words[0])};
}

inline void upload(Buffer& memory, const Bytes& bytes) {
  Ints words(bytes.size() / sizeof(std::int32_t));
  if (!bytes.empty()) std::memcpy(words.data(), bytes.data(), bytes.size());
  memory.upload(words);
}

/// The product of the sizes of the dimensions [first, last).
inline std::int64_t elements_of(const Tensor& tensor, int first, int last) {
  std::int64_t count = 1;
  for (int i = first; i < last; ++i) count *= tensor.shape[i];
  return count;
}

/// Whether a tensor has elements and is still as it was made: contiguous, at the begin of its
/// memory, with an element type of four bytes at most, so that half of the memory is unused.
inline bool is_plain(const Argument& argument) {
  const Tensor& tensor = *argument.tensor;
  if (argument.is_placed || tensor.rank < 1 || tensor.rank > 4 ||
      name(tensor.dtype) == "unknown dtype" || tensor.dtype == DType::f64 ||
      tensor.device != argument.memory.tensor().device || tensor.data != argument.begin())
    return false;
  std::int64_t stride = 1;
  for (int i = tensor.rank - 1; i >= 0; --i) {
    if (tensor.shape[i] < 1 || tensor.shape[i] > 100 || tensor.stride[i] != stride) return false;
    stride *= tensor.shape[i];
  }
  return argument.memory.tensor().shape[0] == 2 * stride;
}

/// Strides of a tensor whose dimensions from `inner` on are contiguous; the rows that these make up
/// follow each other at `row_stride`.
inline void set_strides(Tensor& tensor, int inner, std::int64_t row_stride) {
  std::int64_t stride = 1;
  for (int i = tensor.rank - 1; i >= 0; --i) {
    if (i == inner - 1) stride = row_stride;
    tensor.stride[i] = stride;
    stride *= tensor.shape[i];
  }
}

/// Copies rows of `row_bytes` from one distance between them to another.
inline void copy_rows(const Bytes& from, std::int64_t rows, std::int64_t row_bytes, Bytes& to,
                      std::int64_t first, std::int64_t distance) {
  for (std::int64_t row = 0; row < rows; ++row)
    std::copy_n(from.begin() + row * row_bytes, row_bytes, to.begin() + first + row * distance);
}

/// Leaves gaps between the rows of a plain tensor that are as wide as they: the dimensions from
/// `inner` > 0 on make up a row.
inline void spread_rows(Argument& argument, int inner) {
  Tensor& tensor = *argument.tensor;
  const std::int64_t width = elements_of(tensor, inner, tensor.rank);
  const std::int64_t row_bytes = width * element_bytes(tensor.dtype);
  const Bytes packed = bytes_of(argument.memory);
  Bytes spread(packed.size(), std::byte{0xFF});
  copy_rows(packed, elements_of(tensor, 0, inner), row_bytes, spread, 0, 2 * row_bytes);
  upload(argument.memory, spread);
  set_strides(tensor, inner, 2 * width);
  argument.is_placed = true;
}

/// Spreads the rows of `host` and puts those of `guest`, its dimensions from `guest_inner` on, into
/// the gaps. Both are plain. False, and nothing is done, if they do not fit there.
inline bool put_between(Argument& guest, int guest_inner, Argument& host, int host_inner) {
  const Tensor& around = *host.tensor;
  Tensor& tensor = *guest.tensor;
  const std::int64_t size = element_bytes(tensor.dtype);
  const std::int64_t gap =
      elements_of(around, host_inner, around.rank) * element_bytes(around.dtype);
  const std::int64_t rows = elements_of(tensor, 0, guest_inner);
  const std::int64_t row_bytes = elements_of(tensor, guest_inner, tensor.rank) * size;
  if (row_bytes > gap || rows > elements_of(around, 0, host_inner) || gap % size != 0) return false;
  spread_rows(host, host_inner);
  Bytes both = bytes_of(host.memory);
  copy_rows(bytes_of(guest.memory), rows, row_bytes, both, gap, 2 * gap);
  upload(host.memory, both);
  set_strides(tensor, guest_inner, 2 * gap / size);
  tensor.data = host.begin() + gap;
  guest.is_placed = true;
  guest.within = &host;
  return true;
}

/// Puts a plain tensor over another one, `offset` bytes behind its begin, alone or with its values.
/// False, and nothing is done, if the memory there is too small.
inline bool put_over(Argument& guest, Argument& host, std::int64_t offset, bool with_values) {
  Tensor& tensor = *guest.tensor;
  const std::int64_t bytes = elements_of(tensor, 0, tensor.rank) * element_bytes(tensor.dtype);
  if (offset + bytes > host.memory.tensor().shape[0] * 4) return false;
  if (with_values) {
    Bytes both = bytes_of(host.memory);
    copy_rows(bytes_of(guest.memory), 1, bytes, both, offset, 0);
    upload(host.memory, both);
  }
  tensor.data = host.begin() + offset;
  guest.is_placed = true;
  guest.within = &host;
  return true;
}

}  // namespace winnow::tests
