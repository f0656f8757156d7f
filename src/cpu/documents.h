// SPDX-License-Identifier: Apache-2.0
// Locates a row within its packed document.
#pragma once

#include <cstdint>
#include <span>

#include "core/documents.h"
#include "core/threads.h"
#include "core/view.h"

namespace winnow::cpu {

class Documents {
 public:
  static std::size_t bytes(const Tensor& cu_seqlens) {
    return Scratch::bytes<std::int32_t>(cu_seqlens.shape[0]);
  }

  /// `ratio` is the number of rows per pool entry; 0 means no pools. The workspace of `execution`
  /// has at least `bytes`.
  Documents(const Tensor& cu_seqlens, const Tensor& cu_seqlens_padded, const Tensor& query_rows,
            std::int32_t ratio, const Execution& execution)
      : real_(cu_seqlens),
        padded_(cu_seqlens_padded ? cu_seqlens_padded : cu_seqlens),
        query_rows_(query_rows),
        count_(cu_seqlens.shape[0] - 1),
        pool_begins_(static_cast<std::int32_t*>(execution.workspace),
                     static_cast<std::size_t>(cu_seqlens.shape[0])) {
    std::int32_t pools = 0;
    for (std::int64_t i = 0; i < count_; ++i) {
      pool_begins_[i] = pools;
      if (ratio > 0) pools += (real_(i + 1) - real_(i)) / ratio;
    }
  }

  /// The global row of query t, or -1 if it has none.
  std::int64_t row(std::int64_t t) const { return query_rows_ ? query_rows_(t) : t; }

  RowPlace place(std::int64_t row) const {
    if (row < 0 || row >= padded_(count_)) return {};
    const std::int64_t i = document_of(row, padded_, count_);
    return {true, padded_(i), real_(i + 1) - real_(i), row - padded_(i), pool_begins_[i]};
  }

 private:
  View<const std::int32_t, 1> real_;
  View<const std::int32_t, 1> padded_;
  View<const std::int32_t, 1> query_rows_;
  std::int64_t count_;
  std::span<std::int32_t> pool_begins_;
};

}  // namespace winnow::cpu
