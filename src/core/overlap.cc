// SPDX-License-Identifier: Apache-2.0
#include "core/overlap.h"

#include <algorithm>
#include <array>

namespace winnow {
namespace {

// No memory is that large: longer hulls that meet count as shared, and sums of two others and of
// their offsets stay within 64 bits.
constexpr std::uint64_t kMaxBytes = std::uint64_t{1} << 60;
// Pairs of rows that are looked at.
constexpr int kMaxSteps = 1000;

/// `size` rows at multiples of `stride`; all in bytes.
struct RowDim {
  std::int64_t stride;
  std::int64_t size;
  std::int64_t row_bytes;  // hull of one row
};

/// Rows of rows, the largest stride first; without dimensions, an interval of bytes.
struct Rows {
  const RowDim* dims;
  int rank;
  std::int64_t bytes;  // hull

  Rows row() const { return {dims + 1, rank - 1, dims->row_bytes}; }
};

/// The dimensions of a tensor beyond those that make up its contiguous intervals.
class Layout {
 public:
  explicit Layout(const Tensor& tensor) : bytes_(element_bytes(tensor.dtype)) {
    std::array<RowDim, 4> ascending{};
    int rank = 0;
    for (int i = 0; i < tensor.rank; ++i) {
      // A dimension of stride 0 repeats the same addresses.
      if (tensor.shape[i] < 2 || tensor.stride[i] == 0) continue;
      int place = rank++;
      for (; place > 0 && ascending[place - 1].stride > tensor.stride[i] * bytes_; --place)
        ascending[place] = ascending[place - 1];
      ascending[place] = {tensor.stride[i] * bytes_, tensor.shape[i], 0};
    }
    for (int i = 0; i < rank; ++i) {
      RowDim& dim = ascending[i];
      dim.row_bytes = bytes_;
      if (rank_ > 0 || dim.stride > bytes_) dims_[dims_.size() - ++rank_] = dim;
      bytes_ += dim.stride * (dim.size - 1);
    }
  }
  Rows rows() const { return {dims_.data() + dims_.size() - rank_, rank_, bytes_}; }

 private:
  std::array<RowDim, 4> dims_{};  // the last rank_ of them
  int rank_ = 0;
  std::int64_t bytes_;
};

std::int64_t floor_divide(std::int64_t a, std::int64_t b) { return a / b - (a % b < 0 ? 1 : 0); }

/// Whether a and b have a byte in common, where b begins `distance` bytes behind the begin of a.
bool meet(const Rows& a, const Rows& b, std::int64_t distance, int& steps) {
  if (distance >= a.bytes || -distance >= b.bytes) return false;
  if (a.rank == 0 && b.rank == 0) return true;
  --steps;
  const std::int64_t stride_a = a.rank > 0 ? a.dims->stride : 0;
  const std::int64_t stride_b = b.rank > 0 ? b.dims->stride : 0;
  if (stride_a < stride_b) return meet(b, a, -distance, steps);
  const Rows row = a.row();
  if (stride_a == stride_b) {
    // Row i of a and row i + k of b are as far apart as row 0 and row k.
    const Rows other = b.row();
    const std::int64_t first =
        std::max(1 - a.dims->size, floor_divide(-other.bytes - distance, stride_a) + 1);
    const std::int64_t last =
        std::min(b.dims->size - 1, floor_divide(row.bytes - distance - 1, stride_a));
    for (std::int64_t k = first; k <= last && steps > 0; ++k)
      if (meet(row, other, distance + k * stride_a, steps)) return true;
    return false;
  }
  const std::int64_t first =
      std::max<std::int64_t>(0, floor_divide(distance - row.bytes, stride_a) + 1);
  const std::int64_t last =
      std::min(a.dims->size - 1, floor_divide(distance + b.bytes - 1, stride_a));
  for (std::int64_t i = first; i <= last && steps > 0; ++i)
    if (meet(row, b, distance - i * stride_a, steps)) return true;
  return false;
}

}  // namespace

Hull hull_of(const Tensor& tensor) {
  if (!tensor) return {};
  std::uint64_t last = 0;  // the strides of an empty tensor may be anything: this may wrap around
  for (int i = 0; i < tensor.rank; ++i) {
    if (tensor.shape[i] == 0) return {};
    last += static_cast<std::uint64_t>(tensor.shape[i] - 1) *
            static_cast<std::uint64_t>(tensor.stride[i]);
  }
  return {reinterpret_cast<std::uintptr_t>(tensor.data),
          (last + 1) * static_cast<std::uint64_t>(element_bytes(tensor.dtype))};
}

bool share_memory(const Tensor& a, const Tensor& b) {
  const Hull hull_a = hull_of(a);
  const Hull hull_b = hull_of(b);
  if (!meet(hull_a, hull_b)) return false;
  if (std::max(hull_a.bytes, hull_b.bytes) > kMaxBytes) return true;
  int steps = kMaxSteps;
  const Layout layout_a(a);
  const Layout layout_b(b);
  return meet(layout_a.rows(), layout_b.rows(),
              static_cast<std::int64_t>(hull_b.begin - hull_a.begin), steps);
}

}  // namespace winnow
