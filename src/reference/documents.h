// SPDX-License-Identifier: Apache-2.0
// Locates a row within its packed document.
#pragma once

#include <cstdint>

#include "core/documents.h"
#include "core/view.h"

namespace winnow::reference {

class Documents {
 public:
  /// `ratio` is the number of rows per pool entry; 0 means no pools.
  Documents(const Tensor& cu_seqlens, const Tensor& cu_seqlens_padded, const Tensor& query_rows,
            std::int32_t ratio)
      : real_(cu_seqlens),
        padded_(cu_seqlens_padded ? cu_seqlens_padded : cu_seqlens),
        query_rows_(query_rows),
        count_(cu_seqlens.shape[0] - 1),
        ratio_(ratio) {}

  /// The global row of query t, or -1 if it has none.
  std::int64_t row(std::int64_t t) const { return query_rows_ ? query_rows_(t) : t; }

  RowPlace place(std::int64_t row) const {
    RowPlace place;
    for (std::int64_t i = 0; i < count_; ++i) {
      place.document_begin = padded_(i);
      place.real_length = real_(i + 1) - real_(i);
      place.position = row - place.document_begin;
      place.in_document = row >= padded_(i) && row < padded_(i + 1);
      if (place.in_document) return place;
      if (ratio_ > 0) place.pool_begin += place.real_length / ratio_;
    }
    return {};
  }

 private:
  View<const std::int32_t, 1> real_;
  View<const std::int32_t, 1> padded_;
  View<const std::int32_t, 1> query_rows_;
  std::int64_t count_;
  std::int64_t ratio_;
};

}  // namespace winnow::reference
