// SPDX-License-Identifier: Apache-2.0
// What single queries got from a training step, held against the reference in double.
#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <numeric>
#include <string>
#include <string_view>

#include "harness/trial.h"
#include "tools/oracle_memory.h"
#include "tools/step_check.h"

namespace winnow::tools {
namespace {

using harness::at_least_one;
using harness::Buffer;
using harness::compare;
using harness::compare_exactly;
using harness::kOracle;
using harness::Report;
using harness::Rows;
using harness::TrainingStep;

constexpr std::int64_t kWidestRow = 1024;  // that attention takes

class RowCheck {
 public:
  RowCheck(const TrainingStep& step, const Rows& rows)
      : step_(step), c_(step.c), rows_(rows), count_(static_cast<std::int64_t>(rows.size())) {}

  std::vector<Report> reports() {
    check_windows();
    check_selection();
    if (c_.window > 0) check_lists();
    check_attention();
    if (c_.head_dim > 0) check_projection();
    check_loss();
    check_index_backward();
    return reports_;
  }

 private:
  /// A call of the step on the compared rows, in double: inputs are the step's, outputs are new.
  template <class Args>
  Args oracle_of(const Args& args) {
    return harness::layer_arguments<Args>(
        [&](std::string_view name, FieldRole role) {
          const Buffer& source = step_.buffers.find(name);
          if (!source.tensor()) return Tensor{};
          if (role == FieldRole::input) return input(name, source);
          harness::Shape shape = harness::shape_of(source.tensor());
          if (!is_of_keys(name)) shape[0] = count_;
          return memory_.output(source.tensor().dtype == DType::i32 ? DType::i32 : DType::f64,
                                shape);
        },
        args);
  }
  Tensor input(std::string_view name, const Buffer& source) {
    const auto [found, is_new] = inputs_.try_emplace(std::string(name));
    if (is_new) found->second = memory_.rows(source, is_of_keys(name) ? all_rows(source) : rows_);
    return found->second;
  }
  /// Whether its rows are keys or heads, and not queries.
  static bool is_of_keys(std::string_view name) {
    if (name.starts_with("d_")) name.remove_prefix(2);
    return name == "kv" || name == "index_k" || name == "sink" || name == "w_v";
  }
  static Rows all_rows(const Buffer& source) {
    Rows rows(static_cast<std::size_t>(source.tensor().shape[0]));
    std::iota(rows.begin(), rows.end(), 0);
    return rows;
  }
  std::vector<double> values_of(const Tensor& tensor) const { return memory_.values_of(tensor); }
  void add(Report report) { reports_.push_back(std::move(report)); }

  void check_windows() {
    std::vector<std::int32_t> lengths = step_.end.download_ints();
    const std::vector<std::int32_t> begin = step_.begin.download_ints();
    std::transform(lengths.begin(), lengths.end(), begin.begin(), lengths.begin(), std::minus<>());
    std::vector<std::int32_t> expected;
    for (const harness::QueryPlace& place : step_.batch.places)
      expected.push_back(static_cast<std::int32_t>(place.index_keys));
    add(compare_exactly("window lengths", lengths, expected));
  }

  /// Scores of the chosen keys against the oracle's, and, each in falling order, the oracle's
  /// scores of the chosen keys against those of its own choice.
  void check_selection() {
    const std::int64_t topk = c_.index_topk();
    IndexTopkForward args = oracle_of(step_.select);
    const IndexTopkForward own_choice = args;
    args.indices = input("selected", step_.selected);
    args.lengths = input("selected_lengths", step_.selected_lengths);
    args.replay = true;
    run(args, kOracle);
    std::vector<double> chosen = values_of(args.scores);
    const std::vector<double> units = score_units(own_choice);
    const harness::Limit limit = harness::score_limit(c_.dtype);
    add(compare("scores", step_.scores.download(rows_), chosen, limit, units));

    args = own_choice;
    args.order = SlotOrder::by_score;
    run(args, kOracle);
    for (auto row = chosen.begin(); row != chosen.end(); row += topk)
      std::sort(row, row + topk, std::greater<>());
    // Both sides of a boundary may be off by the error of a score.
    add(compare("selection", chosen, values_of(args.scores), {2 * limit.value, true, false},
                units));
  }

  /// The largest sum_h |w_h| sum_d |q_hd k_d| of each row's window, once for each slot: on
  /// magnitudes no product is negative, so the best score of a row is its unit.
  std::vector<double> score_units(IndexTopkForward args) {
    args.q = memory_.magnitudes(args.q);
    args.k = memory_.magnitudes(args.k);
    args.weights = memory_.magnitudes(args.weights);
    args.indices = memory_.output(DType::i32, {count_, 1});
    args.scores = memory_.output(DType::f64, {count_, 1});
    run(args, kOracle);
    std::vector<double> units;
    for (const double unit : values_of(args.scores))
      units.insert(units.end(), c_.index_topk(), unit);
    return units;
  }

  void check_lists() {
    const WindowIndices args = memory_.on_host(step_.lists, step_.buffers);
    run(args, kOracle);
    const auto compare_ints = [&](const char* what, const Buffer& actual, const Tensor& expected) {
      add(compare_exactly(what, actual.download_ints(),
                          memory_.buffer_of(expected).download_ints()));
    };
    compare_ints("indices", step_.indices, args.indices);
    compare_ints("lengths", step_.lengths, args.lengths);
  }

  /// Forward and backward of attention, and the target that goes with its lse.
  void check_attention() {
    const SparseAttentionForward forward = oracle_of(step_.attend);
    run(forward, kOracle);
    const std::vector<double> lse = values_of(forward.lse);
    const std::vector<double> out = values_of(forward.out);
    add(compare("out", step_.out.download(rows_), out, harness::output_limit(c_.dtype),
                output_units(out, forward)));
    add(compare("lse", step_.lse.download(rows_), lse, harness::lse_limit(c_.dtype),
                at_least_one(lse)));

    IndexTarget target = oracle_of(step_.find_target);
    target.lse = forward.lse;
    run(target, kOracle);
    add(compare("target", step_.target.download(rows_), values_of(target.target),
                harness::target_limit(c_.dtype)));

    SparseAttentionBackward backward = oracle_of(step_.attend_backward);
    backward.out = forward.out;
    backward.lse = forward.lse;
    run(backward, kOracle);
    add(compare("d_q", step_.d_q.download(rows_), values_of(backward.d_q),
                harness::gradient_limit(c_.dtype)));
  }

  /// |out| + sum_j p_j |v_j|. The latter is attention over keys that carry some channels of |v| in
  /// front of their own, which meet zeros in q and leave p as it is.
  std::vector<double> output_units(const std::vector<double>& out, SparseAttentionForward args) {
    const std::int64_t width = std::min(c_.v_dim, kWidestRow - c_.qk_dim);
    const std::vector<double> q = step_.q.download(rows_);
    const std::vector<double> kv = step_.kv.download();
    std::vector<double> units = harness::magnitudes(out);
    args.scale = c_.attention_scale();  // for its own width there would be another default
    for (std::int64_t first = 0; first < c_.v_dim; first += width) {
      const std::int64_t v_dim = std::min(width, c_.v_dim - first);
      std::vector<double> values = in_front(v_dim, kv);
      for (std::int64_t s = 0; s < c_.keys(); ++s)
        for (std::int64_t d = 0; d < v_dim; ++d)
          values[s * (v_dim + c_.qk_dim) + d] = std::abs(kv[s * c_.qk_dim + first + d]);
      const std::int64_t qk_dim = v_dim + c_.qk_dim;
      args.q = memory_.filled(DType::f64, {count_, c_.heads, qk_dim}, in_front(v_dim, q));
      args.kv = memory_.filled(DType::f64, {c_.keys(), qk_dim}, values);
      args.out = memory_.output(DType::f64, {count_, c_.heads, v_dim});
      args.lse = memory_.output(DType::f64, {count_, c_.heads});
      run(args, kOracle);
      const std::vector<double> sum = values_of(args.out);
      for (std::int64_t i = 0; i < static_cast<std::int64_t>(sum.size()); ++i)
        units[i / v_dim * c_.v_dim + first + i % v_dim] += sum[i];
    }
    return units;
  }

  /// Rows of qk_dim elements, each with `zeros` zeros in front.
  std::vector<double> in_front(std::int64_t zeros, const std::vector<double>& rows) const {
    std::vector<double> result;
    for (auto row = rows.begin(); row != rows.end(); row += c_.qk_dim) {
      result.resize(result.size() + zeros, 0.0);
      result.insert(result.end(), row, row + c_.qk_dim);
    }
    return result;
  }

  void check_projection() {
    ValueProjectionForward forward = oracle_of(step_.project);
    run(forward, kOracle);
    const std::vector<double> expected = values_of(forward.out_v);
    forward.out = memory_.magnitudes(forward.out);
    forward.w_v = memory_.magnitudes(forward.w_v);
    run(forward, kOracle);
    std::vector<double> units = values_of(forward.out_v);  // |out_v| + sum_d |w_v| |out|
    for (std::size_t i = 0; i < units.size(); ++i) units[i] += std::abs(expected[i]);
    add(compare("out_v", step_.out_v.download(rows_), expected, harness::output_limit(c_.dtype),
                units));
    const ValueProjectionBackward backward = oracle_of(step_.project_backward);
    run(backward, kOracle);
    add(compare("d_out", step_.d_out.download(rows_), values_of(backward.d_out),
                harness::gradient_limit(c_.dtype)));
  }

  void check_loss() {
    const IndexLoss args = oracle_of(step_.find_loss);
    run(args, kOracle);
    const std::vector<double> expected = values_of(args.loss);
    add(compare("loss", step_.loss.download(rows_), expected, harness::loss_limit(DType::f32),
                at_least_one(expected)));
    add(compare("d_scores", step_.d_scores.download(rows_), values_of(args.d_scores),
                harness::loss_gradient_limit()));
  }

  void check_index_backward() {
    const IndexTopkBackward args = oracle_of(step_.select_backward);
    run(args, kOracle);
    const harness::Limit limit = harness::gradient_limit(c_.dtype);
    add(compare("d_index_q", step_.d_index_q.download(rows_), values_of(args.d_q), limit));
    add(compare("d_weights", step_.d_weights.download(rows_), values_of(args.d_weights), limit));
  }

  const TrainingStep& step_;
  const harness::Case& c_;
  const Rows& rows_;
  std::int64_t count_;
  OracleMemory memory_;
  std::map<std::string, Tensor> inputs_;
  std::vector<Report> reports_;
};

}  // namespace

std::vector<Report> check_rows(const TrainingStep& step, const Rows& rows) {
  return RowCheck(step, rows).reports();
}

}  // namespace winnow::tools
