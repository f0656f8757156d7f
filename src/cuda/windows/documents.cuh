// SPDX-License-Identifier: Apache-2.0
// The place of a row in its packed document, on the device. Illegal offsets (negative, decreasing)
// give some place, but never one outside of the arrays.
#pragma once

#include <cstdint>
#include <limits>

#include "core/documents.h"
#include "cuda/common/clamp.cuh"
#include "cuda/common/runtime.h"
#include "winnow/tensor.h"

namespace winnow::cuda {

inline constexpr std::int64_t kMaxInt32 = std::numeric_limits<std::int32_t>::max();

struct Documents {
  const std::int32_t* real;         // [count + 1]
  const std::int32_t* padded;       // [count + 1]
  const std::int32_t* query_rows;   // [tokens], or null
  const std::int32_t* pool_begins;  // [count], or null: no pools
  std::int64_t count;

  /// The global row of query t, or a negative number for none.
  __device__ std::int64_t row(std::int64_t t) const {
    return query_rows != nullptr ? query_rows[t] : t;
  }

  __device__ std::int64_t real_length(std::int64_t i) const {
    const std::int64_t slots = std::int64_t{padded[i + 1]} - padded[i];
    return clamp(std::int64_t{real[i + 1]} - real[i], 0, slots > 0 ? slots : 0);
  }

  __device__ RowPlace place(std::int64_t row) const {
    if (count == 0 || row < 0 || row >= padded[count]) return {};
    std::int64_t i = 0;  // the last document that begins at or before the row, so no empty one
    for (std::int64_t end = count; end - i > 1;) {
      const std::int64_t middle = i + (end - i) / 2;
      if (padded[middle] <= row) {
        i = middle;
      } else {
        end = middle;
      }
    }
    const std::int64_t begin = padded[i];
    if (begin < 0 || row < begin || row >= padded[i + 1]) return {};
    return {true, begin, real_length(i), row - begin, pool_begins != nullptr ? pool_begins[i] : 0};
  }
};

/// Bytes of the workspace slice that make_documents takes.
inline std::size_t pool_bytes(const Tensor& cu_seqlens, bool has_pools) {
  return has_pools ? static_cast<std::size_t>(cu_seqlens.shape[0]) * sizeof(std::int32_t) : 0;
}

/// Where there are pools, launches the count of the pool entries before each document.
Documents make_documents(const Tensor& cu_seqlens, const Tensor& cu_seqlens_padded,
                         const Tensor& query_rows, std::int32_t ratio, bool has_pools,
                         Workspace& workspace, cudaStream_t stream);

}  // namespace winnow::cuda
