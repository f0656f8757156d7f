// SPDX-License-Identifier: Apache-2.0
// Checks of key_windows and window_indices: equal to what a walk through the documents gives.
#include "harness/trial.h"
#include "harness/windows.h"

namespace winnow::harness {
namespace {

std::vector<std::int32_t> padded(const WindowLists& lists, std::int64_t topk) {
  std::vector<std::int32_t> result;
  for (const std::vector<std::int32_t>& list : lists) {
    result.insert(result.end(), list.begin(), list.end());
    result.insert(result.end(), topk - static_cast<std::int64_t>(list.size()), -1);
  }
  return result;
}

std::vector<std::int32_t> lengths_of(const WindowLists& lists) {
  std::vector<std::int32_t> result;
  for (const auto& list : lists) result.push_back(static_cast<std::int32_t>(list.size()));
  return result;
}

}  // namespace

std::vector<Report> check_key_windows(const Case& c, const Execution& execution,
                                      std::uint64_t seed) {
  Trial trial(c, execution, seed);
  KeyWindowsWork work(c, trial.tested(), seed);
  const auto check = [&](std::int32_t ratio, PaddingRows padding_rows, const std::string& form) {
    KeyWindows args = work.args;
    args.ratio = ratio;
    args.padding_rows = padding_rows;
    work.begin.poison();
    work.end.poison();
    if (!trial.run("begin, end" + form, args)) return;
    const Windows expected = windows_of(c, seed, ratio, padding_rows);
    trial.add(compare_exactly("begin" + form, work.begin.download_ints(), expected.begin));
    trial.add(compare_exactly("end" + form, work.end.download_ints(), expected.end));
  };
  check(1, PaddingRows::empty, "");
  if (c.padded) check(1, PaddingRows::see_document, ", see_document");
  if (c.has_pools()) check(c.ratio, PaddingRows::empty, " of pools");
  if (c.has_pools() && c.padded)
    check(c.ratio, PaddingRows::see_document, " of pools, see_document");
  trial.check_canaries(work.buffers);
  return trial.reports();
}

std::vector<Report> check_window_indices(const Case& c, const Execution& execution,
                                         std::uint64_t seed) {
  Trial trial(c, execution, seed);
  WindowIndicesWork work(c, trial.tested(), seed);
  const auto check = [&](const WindowIndices& args, const Buffer& indices,
                         const WindowLists& expected, const std::string& form) {
    work.lengths.poison();
    if (!trial.run("indices" + form, args)) return;
    trial.add(compare_exactly("indices" + form, indices.download_ints(),
                              padded(expected, args.indices.shape[1])));
    trial.add(
        compare_exactly("lengths" + form, work.lengths.download_ints(), lengths_of(expected)));
  };
  if (c.has_pools()) check(work.args, work.indices, window_lists(c, seed, work.pool_ids), "");
  check(work.all_pools_args, work.wide_indices, work.all_pools,
        c.has_pools() ? " of all pools" : "");
  trial.check_canaries(work.buffers);
  return trial.reports();
}

}  // namespace winnow::harness
