// SPDX-License-Identifier: Apache-2.0
// The check of index_topk. Selections are judged by scores: of nearly equal keys either may be
// taken.
#include <algorithm>
#include <cmath>
#include <limits>
#include <map>

#include <fmt/format.h>

#include "harness/index_topk.h"
#include "harness/score_pattern.h"
#include "harness/trial.h"

namespace winnow::harness {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

Buffer magnitudes_of(const Buffer& source) {
  Buffer result(Device{}, DType::f64, shape_of(source.tensor()));
  result.upload(magnitudes(source.download()));
  return result;
}

/// The oracle's score of every key of every compared row, and the unit of the row's errors.
struct Scores {
  std::int64_t keys;
  std::vector<double> of_key;  // [rows, keys]; NaN outside the window and where the score is NaN
  std::vector<double> units;   // [rows]: the largest sum_h |w_h| sum_d |q_hd k_d| of the window
};

Scores scores_of(const Case& c, const IndexTopkWork& oracle) {
  const std::int64_t rows = oracle.forward.q.shape[0];
  const std::int64_t width = std::max<std::int64_t>(c.index_keys(), 1);
  const Buffer indices(Device{}, DType::i32, {rows, width});
  const Buffer scores(Device{}, DType::f64, {rows, width});
  IndexTopkForward args = oracle.forward;
  args.indices = indices.tensor();
  args.scores = scores.tensor();
  args.lengths = {};
  run(args, kOracle);
  Scores result{c.index_keys(), std::vector<double>(rows * c.index_keys(), std::nan("")), {}};
  const std::vector<std::int32_t> key = indices.download_ints();
  const std::vector<double> score = scores.download();
  for (std::size_t i = 0; i < key.size(); ++i)
    if (key[i] >= 0)
      result.of_key[static_cast<std::int64_t>(i) / width * c.index_keys() + key[i]] = score[i];

  // On magnitudes no product is negative, so the best score of a row is its unit.
  const Buffer q = magnitudes_of(oracle.q);
  const Buffer k = magnitudes_of(oracle.k);
  const Buffer weights = magnitudes_of(oracle.weights);
  const Buffer best(Device{}, DType::i32, {rows, 1});
  const Buffer units(Device{}, DType::f64, {rows, 1});
  args.q = q.tensor();
  args.k = k.tensor();
  args.weights = weights.tensor();
  args.indices = best.tensor();
  args.scores = units.tensor();
  run(args, kOracle);
  result.units = units.download();
  return result;
}

/// A row as the backend gave it.
struct Selected {
  std::span<const std::int32_t> indices;
  std::int32_t length;
  std::int32_t begin, end;
};

/// What is wrong with a row whatever the scores are; empty if nothing is.
std::string disorder(const Selected& row, std::span<const double> scores) {
  const auto topk = static_cast<std::int32_t>(row.indices.size());
  std::int32_t candidates = 0;
  for (std::int32_t s = row.begin; s < row.end; ++s) candidates += scores[s] > -kInfinity ? 1 : 0;
  if (row.length != std::min(topk, candidates))
    return fmt::format("length {}, expected {}", row.length, std::min(topk, candidates));
  for (std::int32_t j = 0; j < topk; ++j) {
    const std::int32_t s = row.indices[j];
    if (j >= row.length) {
      if (s != -1) return fmt::format("slot {} is {} behind the valid ones", j, s);
      continue;
    }
    if (s < row.begin || s >= row.end)
      return fmt::format("slot {} is {}, outside the window", j, s);
    if (j > 0 && s <= row.indices[j - 1]) return fmt::format("slot {} does not ascend", j);
    if (!(scores[s] > -kInfinity))
      return fmt::format("slot {} is {}, whose score is {}", j, s, scores[s]);
  }
  return {};
}

/// Keys that are the same have the same score, of which the smaller key is taken first. Returns
/// what is wrong with that; empty if nothing is.
std::string order_of_twins(const Case& c, const Selected& row) {
  std::map<std::int64_t, std::int32_t> first_left;  // of each number that twins share
  std::int32_t j = 0;
  for (std::int32_t s = row.begin; s < row.end; ++s) {
    const std::int64_t twin = twin_of(c, s);
    const bool taken = j < row.length && row.indices[j] == s;
    if (taken) ++j;
    if (twin < 0) continue;
    if (!taken) {
      first_left.emplace(twin, s);
    } else if (const auto left = first_left.find(twin); left != first_left.end()) {
      return fmt::format("{} is taken, but not {}, which has the same score", s, left->second);
    }
  }
  return {};
}

/// The best score left out above the worst one taken.
double excess(const Selected& row, std::span<const double> scores) {
  double worst_taken = kInfinity;
  double best_left = -kInfinity;
  std::int32_t j = 0;
  for (std::int32_t s = row.begin; s < row.end; ++s) {
    if (j < row.length && row.indices[j] == s) {
      worst_taken = std::min(worst_taken, scores[s]);
      ++j;
    } else if (scores[s] > best_left) {
      best_left = scores[s];
    }
  }
  return std::max(best_left - worst_taken, 0.0);
}

/// Two scores may each be off by the limit: a key left out may beat one taken by twice as much, and
/// wherever the gap at the boundary is wider than that the set must be the oracle's.
Report judge_selection(std::string what, const Case& c, const IndexTopkWork& work,
                       const Scores& scores, const Rows& rows,
                       std::span<const std::int32_t> indices, std::span<const std::int32_t> lengths,
                       const Limit& limit) {
  Report report;
  report.what = std::move(what);
  report.limit = 2 * limit.value;
  const std::int64_t topk = work.forward.indices.shape[1];
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const Selected row{indices.subspan(i * topk, topk), lengths[i], work.windows.begin[rows[i]],
                       work.windows.end[rows[i]]};
    const auto of_row = std::span(scores.of_key).subspan(i * scores.keys, scores.keys);
    std::string wrong = disorder(row, of_row);
    if (wrong.empty()) wrong = order_of_twins(c, row);
    if (!wrong.empty()) {
      report.ok = false;
      report.note = fmt::format("row {}: {}", rows[i], wrong);
      return report;
    }
    const double above = excess(row, of_row);
    if (above > 0) report.max = std::max(report.max, above / scores.units[i]);
  }
  report.ok = report.max <= report.limit;
  return report;
}

/// Compares returned scores with the oracle's scores of the same keys; `counts(i, j)` says which
/// slots hold a key.
template <class Counts>
Report judge_scores(std::string what, const Scores& scores, std::span<const std::int32_t> indices,
                    std::span<const double> actual, std::int64_t topk, Counts counts,
                    const Limit& limit) {
  std::vector<double> expected(actual.size(), -kInfinity);
  std::vector<double> units(actual.size());
  for (std::size_t i = 0; i < actual.size(); ++i) {
    const std::size_t row = i / topk;
    units[i] = scores.units[row];
    if (counts(row, i % topk)) expected[i] = scores.of_key[row * scores.keys + indices[i]];
  }
  return compare(std::move(what), actual, expected, limit, units);
}

/// Scores in falling order, equal ones by key, and otherwise the very slots of the ascending run.
Report judge_order(std::string what, std::int64_t topk, std::span<const std::int32_t> by_score,
                   std::span<const double> scores, std::span<const std::int32_t> ascending,
                   std::span<const double> ascending_scores) {
  Report report;
  report.what = std::move(what);
  for (std::size_t first = 0; first < by_score.size() && report.ok; first += topk) {
    std::vector<std::pair<std::int32_t, double>> slots;
    for (std::size_t i = first; i < first + topk; ++i) {
      if (by_score[i] >= 0) slots.emplace_back(by_score[i], scores[i]);
      if (i == first || by_score[i] < 0) continue;
      const bool falls = scores[i - 1] > scores[i] ||
                         (scores[i - 1] == scores[i] && by_score[i - 1] < by_score[i]);
      report.ok = report.ok && falls;
    }
    std::sort(slots.begin(), slots.end());
    for (std::size_t i = 0; i < slots.size(); ++i)
      report.ok = report.ok && slots[i].first == ascending[first + i] &&
                  slots[i].second == ascending_scores[first + i];
    const bool more =
        slots.size() < static_cast<std::size_t>(topk) && ascending[first + slots.size()] >= 0;
    report.ok = report.ok && !more;
    if (!report.ok) report.note = fmt::format("compared row {}", first / topk);
  }
  return report;
}

/// Selection and replay; leaves the ascending selection in the buffers.
bool check_forward(Trial& trial, const Case& c, IndexTopkWork& work, const IndexTopkWork& oracle,
                   const Limit& limit, const std::string& form) {
  const std::int64_t topk = c.index_topk();
  IndexTopkForward by_score = work.forward;
  by_score.order = SlotOrder::by_score;
  const bool sorted = trial.run("order by score" + form, by_score);
  const std::vector<std::int32_t> sorted_indices = trial.compared_ints(work.indices);
  const std::vector<double> sorted_scores = trial.compared(work.scores);

  for (Buffer* output : {&work.indices, &work.lengths, &work.scores}) output->poison();
  if (!trial.run("forward" + form, work.forward)) return false;
  const Scores scores = scores_of(c, oracle);
  const std::vector<std::int32_t> indices = trial.compared_ints(work.indices);
  const std::vector<std::int32_t> lengths = trial.compared_ints(work.lengths);
  const std::vector<double> actual = trial.compared(work.scores);
  const Report selection =
      judge_selection("selection" + form, c, work, scores, trial.rows(), indices, lengths, limit);
  trial.add(selection);
  if (!selection.ok && !selection.note.empty()) return false;  // what follows would only repeat it
  trial.add(judge_scores(
      "scores" + form, scores, indices, actual, topk,
      [&](std::size_t row, std::size_t j) { return static_cast<std::int32_t>(j) < lengths[row]; },
      limit));
  if (sorted)
    trial.add(
        judge_order("order by score" + form, topk, sorted_indices, sorted_scores, indices, actual));
  if (c.exact_scores) {
    run(oracle.forward, kOracle);
    trial.add(compare_exactly("indices" + form, indices, oracle.indices.download_ints()));
    trial.add(compare_exactly("exact scores" + form, actual, oracle.scores.download()));
  }

  if (!trial.run("replay" + form, work.replay)) return true;
  trial.add(judge_scores(
      "replayed scores" + form, scores, trial.compared_ints(work.replay_indices),
      trial.compared(work.replay_scores), topk,
      [&](std::size_t row, std::size_t j) {
        return work.replayed(trial.rows()[row], static_cast<std::int64_t>(j));
      },
      limit));
  return true;
}

void check_backward(Trial& trial, const Case& c, IndexTopkWork& work, const IndexTopkWork& oracle,
                    const IndexTopkBackward& args, const IndexTopkBackward& oracle_args,
                    const Buffer& d_k, const std::string& form) {
  const bool added = args.d_k.dtype == DType::f32;
  const std::vector<double> before = d_k.download();
  const std::vector<double> oracle_before = oracle.d_k.download();
  work.d_q.poison();
  work.d_weights.poison();
  if (!trial.run("backward" + form, args)) return;
  run(oracle_args, kOracle);
  const Limit limit = gradient_limit(c.dtype);
  trial.add(compare("d_q" + form, trial.compared(work.d_q), oracle.d_q.download(), limit));
  trial.add(compare("d_weights" + form, trial.compared(work.d_weights), oracle.d_weights.download(),
                    limit));
  const std::vector<double> after = d_k.download();
  trial.add(compare("d_k" + form, added ? difference(after, before) : after,
                    difference(oracle.d_k.download(), oracle_before), limit));
}

}  // namespace

std::vector<Report> check_index_topk(const Case& c, const Execution& execution,
                                     std::uint64_t seed) {
  Trial trial(c, execution, seed);
  IndexTopkWork work(c, trial.tested(), seed);
  IndexTopkWork oracle(c, trial.oracle(), seed);
  if (check_forward(trial, c, work, oracle, score_limit(c.dtype), "")) {
    oracle.indices.upload(trial.compared_ints(work.indices));
    oracle.lengths.upload(trial.compared_ints(work.lengths));
    check_backward(trial, c, work, oracle, work.backward, oracle.backward, work.d_k, "");
    IndexTopkBackward replay = oracle.replay_backward;
    replay.d_k = oracle.d_k.tensor();
    // A NaN key that is replayed has no gradient that could be told.
    if (!has_nan_keys(c))
      check_backward(trial, c, work, oracle, work.replay_backward, replay,
                     work.d_k_rounded.tensor() ? work.d_k_rounded : work.d_k, ", replayed");
  }
  trial.check_canaries(work.buffers);

  if (c.dtype != DType::bf16) return trial.reports();  // fp8 is the same in all others
  IndexTopkWork work_fp8(c, trial.tested(), seed, true);
  const IndexTopkWork oracle_fp8(c, trial.oracle(), seed, true);
  check_forward(trial, c, work_fp8, oracle_fp8, score_limit(DType::f8_e4m3), ", fp8");
  trial.check_canaries(work_fp8.buffers);
  return trial.reports();
}

}  // namespace winnow::harness
