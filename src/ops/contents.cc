// SPDX-License-Identifier: Apache-2.0
#include "ops/contents.h"

#include "core/view.h"

namespace winnow {
namespace {

using Ints = View<const std::int32_t, 1>;

/// One refused entry: "op: cu_seqlens[3] 2: ...".
template <class... Values>
[[noreturn]] void fail_at(const Check& check, const char* argument, std::int64_t index,
                          std::int64_t value, const char* sentence, const Values&... values) {
  check.fail(fmt::format("{}[{}]", argument, index), fmt::to_string(value), sentence, values...);
}

void check_offsets(const Check& check, const char* argument, const Tensor& tensor) {
  const Ints offsets(tensor);
  if (offsets(0) != 0) fail_at(check, argument, 0, offsets(0), refusal::must_start_at_zero);
  for (std::int64_t i = 1; i < tensor.shape[0]; ++i) {
    if (offsets(i) < offsets(i - 1)) {
      fail_at(check, argument, i, offsets(i), refusal::at_least_as, offsets(i - 1),
              fmt::format("{}[{}]", argument, i - 1));
    }
  }
}

}  // namespace

void check_documents(const Check& check, const Tensor& cu_seqlens, const Tensor& cu_seqlens_padded,
                     const Tensor& query_rows) {
  if (!check.on_host()) return;
  check_offsets(check, "cu_seqlens", cu_seqlens);
  if (cu_seqlens_padded) {
    check_offsets(check, "cu_seqlens_padded", cu_seqlens_padded);
    const Ints real(cu_seqlens);
    const Ints padded(cu_seqlens_padded);
    for (std::int64_t i = 1; i < cu_seqlens.shape[0]; ++i) {
      const std::int64_t least = std::int64_t{padded(i - 1)} + (real(i) - real(i - 1));
      if (padded(i) < least) {
        fail_at(check, "cu_seqlens_padded", i, padded(i), refusal::at_least_as, least,
                fmt::format("document {} has {} real rows", i - 1, real(i) - real(i - 1)));
      }
    }
  }
  if (query_rows) {
    const Ints rows(query_rows);
    for (std::int64_t t = 0; t < query_rows.shape[0]; ++t) {
      if (rows(t) < -1) fail_at(check, "query_rows", t, rows(t), refusal::at_least, -1);
    }
  }
}

void check_windows(const Check& check, const Tensor& begin, const Tensor& end, std::int64_t keys) {
  if (!check.on_host()) return;
  const Ints first(begin);
  const Ints last(end);
  for (std::int64_t t = 0; t < begin.shape[0]; ++t) {
    if (first(t) < 0) fail_at(check, "begin", t, first(t), refusal::at_least, 0);
    if (last(t) < first(t)) {
      fail_at(check, "end", t, last(t), refusal::at_least_as, first(t),
              fmt::format("begin[{}]", t));
    }
    if (last(t) > keys) fail_at(check, "end", t, last(t), refusal::at_most_as, keys, "keys");
  }
}

void check_lengths(const Check& check, const Tensor& lengths, std::int64_t topk) {
  if (!lengths || !check.on_host()) return;
  const Ints counts(lengths);
  for (std::int64_t t = 0; t < lengths.shape[0]; ++t) {
    if (counts(t) < 0) fail_at(check, "lengths", t, counts(t), refusal::at_least, 0);
    if (counts(t) > topk)
      fail_at(check, "lengths", t, counts(t), refusal::at_most_as, topk, "topk");
  }
}

}  // namespace winnow
