// SPDX-License-Identifier: Apache-2.0
// The selection of index_topk, judged by scores.
#include "tools/compare/judge_selection.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>

#include <fmt/format.h>

#include "harness/trial.h"
#include "tools/compare/locate.h"

namespace winnow::dump {
namespace {

using harness::kOracle;
using harness::Shape;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr std::string_view kSlots[] = {"row", "slot"};

class SelectionJudge {
 public:
  SelectionJudge(const DumpedCall& call, const harness::Rows& rows)
      : call_(call),
        rows_(rows),
        field_{"scores", FieldRole::output, {kSlots[0], kSlots[1]}, {}, {}},
        oracle_(call, {.device = {}, .rows = rows, .as_f64 = true}),
        limit_(harness::score_limit(call.find("q")->tensor().dtype)) {
    auto args = oracle_.arguments<IndexTopkForward>();
    const Tensor& indices = args.indices;
    shape_ = {indices.shape[0], indices.shape[1]};
    oracle_.put("scores", DType::f64, shape_, std::vector<double>(count(), 0));
    args = oracle_.arguments<IndexTopkForward>();
    args.order = SlotOrder::by_score;
    run(args, kOracle);
    best_ = oracle_.find("scores").download();
    units_ = score_units(oracle_);
    begin_ = oracle_.find("begin").download_ints();
    end_ = oracle_.find("end").download_ints();
  }

  std::vector<Finding> findings(const Outputs& outputs) {
    const auto indices = outputs.find("indices");
    if (indices == outputs.end()) {
      harness::Report report{.what = "selection"};
      report.skipped = true;
      report.note = "without indices there is nothing to judge";
      return {{report, {}, {}}};
    }
    std::vector<Finding> findings{{slots(outputs, indices->second), {}, {}}};
    std::vector<double> chosen = scores_of(indices->second);
    if (const auto scores = outputs.find("scores"); scores != outputs.end())
      findings.push_back(compared("scores", scores->second, chosen, limit_));
    // A key that the reference would never take counts as none.
    std::replace_if(
        chosen.begin(), chosen.end(), [](double x) { return std::isnan(x); }, -kInfinity);
    for (auto row = chosen.begin(); row != chosen.end(); row += topk())
      std::sort(row, row + topk(), std::greater<>());
    // Both sides of a boundary may be off by the error of a score.
    findings.push_back(
        compared("selection, by falling score", chosen, best_, {2 * limit_.value, true, false}));
    return findings;
  }

 private:
  std::size_t count() const { return static_cast<std::size_t>(shape_[0] * shape_[1]); }
  std::int64_t topk() const { return shape_[1]; }

  Finding compared(const char* what, const std::vector<double>& actual,
                   const std::vector<double>& expected, const harness::Limit& limit) const {
    Finding finding{harness::compare(what, actual, expected, limit, units_), {}, {}};
    locate(field_, shape_, rows_, actual, expected, units_, finding);
    return finding;
  }

  /// The reference's scores of these keys, by replay.
  std::vector<double> scores_of(const std::vector<double>& indices) {
    oracle_.put("indices", DType::i32, shape_, indices);
    auto args = oracle_.arguments<IndexTopkForward>();
    args.lengths = {};
    args.replay = true;
    run(args, kOracle);
    return oracle_.find("scores").download();
  }

  harness::Report slots(const Outputs& outputs, const std::vector<double>& indices) const {
    harness::Report report{.what = "slots"};
    const auto lengths = outputs.find("lengths");
    for (std::size_t row = 0; row < static_cast<std::size_t>(shape_[0]) && report.ok; ++row) {
      const auto first = indices.begin() + static_cast<std::int64_t>(row) * topk();
      const double* const length = lengths == outputs.end() ? nullptr : &lengths->second[row];
      const std::string wrong = disorder({first, first + topk()}, begin_[row], end_[row], length);
      if (wrong.empty()) continue;
      report.ok = false;
      report.note = fmt::format("row {}: {}",
                                rows_.empty() ? static_cast<std::int64_t>(row) : rows_[row], wrong);
    }
    return report;
  }

  /// What is wrong with a row whatever the scores are; empty if nothing is.
  std::string disorder(std::vector<double> keys, std::int32_t begin, std::int32_t end,
                       const double* length) const {
    const auto valid = std::find(keys.begin(), keys.end(), -1.0) - keys.begin();
    if (length != nullptr && *length != static_cast<double>(valid))
      return fmt::format("length {}, but {} slots hold a key", *length, valid);
    for (std::int64_t j = 0; j < topk(); ++j) {
      const double key = keys[j];
      if (j >= valid && key != -1) return fmt::format("slot {} is {} behind a -1", j, key);
      if (j < valid && (key < begin || key >= end))
        return fmt::format("slot {} is {}, outside the window [{}, {})", j, key, begin, end);
    }
    const auto order = call_.options.find("order");
    const bool by_score = order != call_.options.end() && order->second != 0;
    if (by_score) std::sort(keys.begin(), keys.begin() + valid);
    for (std::int64_t j = 1; j < valid; ++j)
      if (keys[j] <= keys[j - 1])
        return by_score ? fmt::format("{} stands in two slots", keys[j])
                        : fmt::format("slot {} does not ascend", j);
    return {};
  }

  const DumpedCall& call_;
  harness::Rows rows_;
  FormatField field_;
  PlacedTensors oracle_;
  harness::Limit limit_;
  Shape shape_;
  std::vector<double> best_;  // scores of the reference's own choice, falling
  std::vector<double> units_;
  std::vector<std::int32_t> begin_, end_;
};

}  // namespace

std::vector<double> score_units(const PlacedTensors& oracle) {
  // On magnitudes no product is negative, so the best score of a row is its unit.
  auto args = oracle.arguments<IndexTopkForward>();
  const std::int64_t rows = args.q.shape[0];
  const std::int64_t topk = args.scores.shape[1];
  harness::NamedBuffers magnitudes;
  for (const char* const name : {"q", "k", "weights"}) {
    const Tensor& tensor = oracle.find(name).tensor();
    const Shape shape(tensor.shape.begin(), tensor.shape.begin() + tensor.rank);
    magnitudes.add(name, harness::Buffer(Device{}, DType::f64, shape))
        .upload(harness::magnitudes(oracle.find(name).download()));
  }
  args.q = magnitudes.find("q").tensor();
  args.k = magnitudes.find("k").tensor();
  args.weights = magnitudes.find("weights").tensor();
  args.indices = magnitudes.add("indices", harness::Buffer({}, DType::i32, {rows, 1})).tensor();
  args.scores = magnitudes.add("scores", harness::Buffer({}, DType::f64, {rows, 1})).tensor();
  args.lengths = {};
  args.replay = false;
  run(args, kOracle);
  std::vector<double> units;
  for (const double unit : magnitudes.find("scores").download())
    units.insert(units.end(), static_cast<std::size_t>(topk), unit);
  return units;
}

Judge selection_judge(const DumpedCall& call, const harness::Rows& rows) {
  const auto judge = std::make_shared<SelectionJudge>(call, rows);
  return [judge](const Outputs& outputs) { return judge->findings(outputs); };
}

}  // namespace winnow::dump
