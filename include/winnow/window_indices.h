// SPDX-License-Identifier: Apache-2.0
// window_indices: the index lists of DeepSeek-V4, a sliding window of rows and then pool entries.
#pragma once

#include <tuple>

#include "winnow/call.h"

namespace winnow {

/// The keys of attention are [rows | pools]: pool entry e is key key_offset + e.
/// For a real row t of a document that begins at row b, the list is
///   the rows max(b, t - window + 1) ... t,  then
///   key_offset + e for each e of pool_ids[t] that is in the pool window of the row, in the order
///   given, or, without pool_ids, for every e of that window. The pool window is that of
///   key_windows with the same ratio.
/// Valid entries come first, without gaps, then -1. Padding rows, rows after the last document and
/// query rows of -1 have empty lists. A list that is longer than topk is refused if the offsets are
/// in host memory; on a device it is truncated.
struct WindowIndices {
  Tensor cu_seqlens{};          // [documents + 1]     i32, as in KeyWindows
  Tensor cu_seqlens_padded{};   // [documents + 1]     i32, optional
  Tensor query_rows{};          // [tokens]            i32, optional
  std::int32_t window = 0;      // rows, including the own one; 0: none
  std::int32_t ratio = 0;       // rows per pool entry, at least 2; 0: no pools
  std::int32_t key_offset = 0;  // the key at which the pools begin, after all rows
  Tensor pool_ids{};            // [tokens, pool_topk]  i32, optional: selected entries; -1: none
  Tensor indices{};             // [tokens, topk]       i32, out; topk >= window + pool_topk
  Tensor lengths{};             // [tokens]             i32, out: number of valid entries

  static constexpr char kOperator[] = "window_indices";
  static constexpr auto fields() {
    using Args = WindowIndices;
    return std::tuple{fields::input("cu_seqlens", &Args::cu_seqlens),
                      fields::input("cu_seqlens_padded", &Args::cu_seqlens_padded),
                      fields::input("query_rows", &Args::query_rows),
                      fields::option("window", &Args::window),
                      fields::option("ratio", &Args::ratio),
                      fields::option("key_offset", &Args::key_offset),
                      fields::input("pool_ids", &Args::pool_ids),
                      fields::output("indices", &Args::indices),
                      fields::output("lengths", &Args::lengths)};
  }
};

extern template struct Operator<WindowIndices>;

inline void window_indices(const WindowIndices& args, const Execution& execution = {}) {
  run(args, execution);
}

}  // namespace winnow
