// SPDX-License-Identifier: Apache-2.0
// The packed document to which a row belongs, and the place of the row in it.
#pragma once

#include <cstdint>

#include "core/view.h"

namespace winnow {

/// What a backend finds out about a row.
struct RowPlace {
  bool in_document = false;
  std::int64_t document_begin = 0;  // first row of the document
  std::int64_t real_length = 0;     // its rows without the padding at its end
  std::int64_t position = 0;        // of this row within the document
  std::int64_t pool_begin = 0;      // first pool entry of the document, if there are pools
};

/// The last of `documents` that begins at or before the row, by binary search, since rows come in
/// any order. `begins` are the offsets of the documents and their end, and the row is below that.
inline std::int64_t document_of(std::int64_t row, const View<const std::int32_t, 1>& begins,
                                std::int64_t documents) {
  std::int64_t document = 0;
  for (std::int64_t end = documents; end - document > 1;) {
    const std::int64_t middle = document + (end - document) / 2;
    (begins(middle) <= row ? document : end) = middle;
  }
  return document;
}

}  // namespace winnow
