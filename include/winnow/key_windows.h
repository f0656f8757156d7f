// SPDX-License-Identifier: Apache-2.0
// key_windows: packed documents -> the keys [begin, end) that every query row may see.
#pragma once

#include <tuple>

#include "winnow/call.h"

namespace winnow {

/// What a padding row (a slot of a document behind its real tokens) sees.
enum class PaddingRows : std::int32_t {
  empty,        // nothing
  see_document  // its whole real document and at least one key, as Automodel does
};

/// Documents stand one after another: document i holds the rows from cu_seqlens_padded[i], of which
/// the first cu_seqlens[i + 1] - cu_seqlens[i] are real. For a row t at position p of a document
/// that begins at row b:
///   ratio 1:  begin = b,  end = b + min(p + 1, real length)
///   ratio r:  begin = b,  end = b + floor(min(p + 1, real length) / r)
/// With a ratio, keys are pools of r rows: every document owns floor(real length / r) of them, one
/// document's after another's, and b is the first of the own document.
/// A padding row has end = begin, or with see_document the formulas above (ratio 1: at least one
/// key). A row past the last document, or a query row of -1: begin = end = 0.
struct KeyWindows {
  Tensor cu_seqlens{};         // [documents + 1]  i32, cumulated real lengths, from 0
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
