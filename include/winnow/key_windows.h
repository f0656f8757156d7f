// SPDX-License-Identifier: Apache-2.0
// key_windows: the keys [begin, end) that each query row of packed documents may see.
#pragma once

#include <tuple>

#include "winnow/call.h"

namespace winnow {

/// What a padding row (a row of a document after its real tokens) sees.
enum class PaddingRows : std::int32_t {
  empty,        // nothing
  see_document  // all real rows of its document and at least one key, as in Automodel
};

/// Documents follow each other: document i begins at row cu_seqlens_padded[i], and its first
/// cu_seqlens[i + 1] - cu_seqlens[i] rows are real. For a row t at position p of a document
/// that begins at row b:
///   ratio 1:  begin = b,  end = b + min(p + 1, real length)
///   ratio r:  begin = b,  end = b + floor(min(p + 1, real length) / r)
/// With ratio r > 1 keys are pools of r rows: every document has floor(real length / r) of them,
/// those of consecutive documents follow each other, and b is the first pool of the document.
/// A padding row has end = begin, or with see_document the formulas above (ratio 1: at least one
/// key). A row after the last document, or a query row of -1, has begin = end = 0.
struct KeyWindows {
  Tensor cu_seqlens{};         // [documents + 1]  i32, cumulative real lengths, from 0
  Tensor cu_seqlens_padded{};  // [documents + 1]  i32, with padding; absent: the same
  Tensor query_rows{};         // [tokens]         i32, global row or -1; absent: 0, 1, 2, ...
  std::int32_t ratio = 1;
  PaddingRows padding_rows = PaddingRows::empty;
  Tensor begin{};  // [tokens]  i32, out
  Tensor end{};    // [tokens]  i32, out

  static constexpr char kOperator[] = "key_windows";
  static constexpr auto fields() {
    using Args = KeyWindows;
    return std::tuple{fields::input("cu_seqlens", &Args::cu_seqlens),
                      fields::input("cu_seqlens_padded", &Args::cu_seqlens_padded),
                      fields::input("query_rows", &Args::query_rows),
                      fields::option("ratio", &Args::ratio),
                      fields::option("padding_rows", &Args::padding_rows, "empty|see_document"),
                      fields::output("begin", &Args::begin),
                      fields::output("end", &Args::end)};
  }
};

extern template struct Operator<KeyWindows>;

inline void key_windows(const KeyWindows& args, const Execution& execution = {}) {
  run(args, execution);
}

}  // namespace winnow
