// SPDX-License-Identifier: Apache-2.0
// What single queries got from a training step, held against the reference in double.
#include <algorithm>
#include <cmath>
#include <functional>

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

  std::vector<Report> run() {
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
  Tensor rows(const Buffer& source) { return memory_.rows(source, rows_); }
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
    Buffer& scores = memory_.output(DType::f64, {count_, topk});
    IndexTopkForward args{.q = rows(step_.index_q),
                          .k = memory_.all(step_.index_k),
                          .weights = rows(step_.weights),
                          .k_scale = {},
                          .begin = rows(step_.begin),
                          .end = rows(step_.end),
                          .indices = rows(step_.selected),
                          .lengths = rows(step_.selected_lengths),
                          .scores = scores.tensor(),
                          .replay = true};
    index_topk_forward(args, kOracle);
    std::vector<double> chosen = scores.download();
    const std::vector<double> units = score_units(args);
    const harness::Limit limit = harness::score_limit(c_.dtype);
    add(compare("scores", step_.scores.download(rows_), chosen, limit, units));

    args.indices = memory_.output(DType::i32, {count_, topk}).tensor();
    args.lengths = {};
    args.order = SlotOrder::by_score;
    args.replay = false;
    index_topk_forward(args, kOracle);
    for (auto row = chosen.begin(); row != chosen.end(); row += topk)
      std::sort(row, row + topk, std::greater<>());
    // Both sides of a boundary may be off by the error of a score.
    add(compare("selection", chosen, scores.download(), {2 * limit.value, true, false}, units));
  }

  /// The largest sum_h |w_h| sum_d |q_hd k_d| of each row's window, once for each slot: on
  /// magnitudes no product is negative, so the best score of a row is its unit.
  std::vector<double> score_units(IndexTopkForward args) {
    args.q = memory_.magnitudes(args.q);
    args.k = memory_.magnitudes(args.k);
    args.weights = memory_.magnitudes(args.weights);
    args.indices = memory_.output(DType::i32, {count_, 1}).tensor();
    args.lengths = {};
    const Buffer& best = memory_.output(DType::f64, {count_, 1});
    args.scores = best.tensor();
    args.replay = false;
    index_topk_forward(args, kOracle);
    std::vector<double> units;
    for (const double unit : best.download()) units.insert(units.end(), c_.index_topk(), unit);
    return units;
  }

  void check_lists() {
    WindowIndices args = step_.lists;
    const Buffer& indices = memory_.output(DType::i32, OracleMemory::shape_of(step_.indices));
    const Buffer& lengths = memory_.output(DType::i32, OracleMemory::shape_of(step_.lengths));
    args.cu_seqlens = memory_.on_host(step_.cu_seqlens);
    args.query_rows = memory_.on_host(step_.query_rows);
    args.pool_ids = memory_.on_host(step_.selected);
    args.indices = indices.tensor();
    args.lengths = lengths.tensor();
    window_indices(args, kOracle);
    add(compare_exactly("indices", step_.indices.download_ints(), indices.download_ints()));
    add(compare_exactly("lengths", step_.lengths.download_ints(), lengths.download_ints()));
  }

  /// Forward and backward of attention, and the target that goes with its lse.
  void check_attention() {
    const Tensor q = rows(step_.q);
    const Tensor kv = memory_.all(step_.kv);
    const Tensor indices = rows(step_.indices);
    const Tensor lengths = rows(step_.lengths);
    const Tensor sink = memory_.all(step_.sink);
    const Buffer& out = memory_.output(DType::f64, {count_, c_.heads, c_.v_dim});
    const Buffer& lse = memory_.output(DType::f64, {count_, c_.heads});
    sparse_attention_forward({.q = q,
                              .kv = kv,
                              .indices = indices,
                              .lengths = lengths,
                              .sink = sink,
                              .out = out.tensor(),
                              .lse = lse.tensor(),
                              .max_logits = {},
                              .scale = c_.scale},
                             kOracle);
    const std::vector<double> expected_lse = lse.download();
    const std::vector<double> expected_out = out.download();
    add(compare("out", step_.out.download(rows_), expected_out, harness::output_limit(c_.dtype),
                output_units(expected_out, indices, lengths, sink)));
    add(compare("lse", step_.lse.download(rows_), expected_lse, harness::lse_limit(c_.dtype),
                at_least_one(expected_lse)));

    const Buffer& target = memory_.output(DType::f64, {count_, c_.index_topk()});
    index_target({.q = q,
                  .kv = kv,
                  .indices = rows(step_.selected),
                  .lengths = rows(step_.selected_lengths),
                  .sink = sink,
                  .lse = lse.tensor(),
                  .target = target.tensor(),
                  .scale = c_.attention_scale(),
                  .key_offset = c_.key_offset()},
                 kOracle);
    add(compare("target", step_.target.download(rows_), target.download(),
                harness::target_limit(c_.dtype)));

    const Buffer& d_q = memory_.output(DType::f64, {count_, c_.heads, c_.qk_dim});
    sparse_attention_backward({.q = q,
                               .kv = kv,
                               .indices = indices,
                               .lengths = lengths,
                               .sink = sink,
                               .out = out.tensor(),
                               .lse = lse.tensor(),
                               .d_out = rows(step_.d_out),
                               .d_lse = {},
                               .d_q = d_q.tensor(),
                               .d_kv = memory_.sum(DType::f64, {c_.keys(), c_.qk_dim}).tensor(),
                               .d_sink = {},
                               .scale = c_.scale},
                              kOracle);
    add(compare("d_q", step_.d_q.download(rows_), d_q.download(),
                harness::gradient_limit(c_.dtype)));
  }

  /// |out| + sum_j p_j |v_j|. The latter is attention over keys that carry some channels of |v| in
  /// front of their own, which meet zeros in q and leave p as it is.
  std::vector<double> output_units(const std::vector<double>& out, const Tensor& indices,
                                   const Tensor& lengths, const Tensor& sink) {
    const std::int64_t width = std::min(c_.v_dim, kWidestRow - c_.qk_dim);
    const std::vector<double> q = step_.q.download(rows_);
    const std::vector<double> kv = step_.kv.download();
    std::vector<double> units = harness::magnitudes(out);
    for (std::int64_t first = 0; first < c_.v_dim; first += width) {
      const std::int64_t v_dim = std::min(width, c_.v_dim - first);
      std::vector<double> values = in_front(v_dim, kv);
      for (std::int64_t s = 0; s < c_.keys(); ++s)
        for (std::int64_t d = 0; d < v_dim; ++d)
          values[s * (v_dim + c_.qk_dim) + d] = std::abs(kv[s * c_.qk_dim + first + d]);
      const Buffer& sums = memory_.output(DType::f64, {count_, c_.heads, v_dim});
      const Tensor lse = memory_.output(DType::f64, {count_, c_.heads}).tensor();
      sparse_attention_forward(
          {.q = memory_.doubles({count_, c_.heads, v_dim + c_.qk_dim}, in_front(v_dim, q)),
           .kv = memory_.doubles({c_.keys(), v_dim + c_.qk_dim}, values),
           .indices = indices,
           .lengths = lengths,
           .sink = sink,
           .out = sums.tensor(),
           .lse = lse,
           .max_logits = {},
           .scale = c_.attention_scale()},
          kOracle);
      const std::vector<double> sum = sums.download();
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
    const Tensor out = rows(step_.out);
    const Tensor w_v = memory_.all(step_.w_v);
    const Buffer& out_v = memory_.output(DType::f64, {count_, c_.heads, c_.head_dim});
    value_projection_forward({.out = out, .w_v = w_v, .out_v = out_v.tensor()}, kOracle);
    const std::vector<double> expected = out_v.download();
    value_projection_forward(
        {.out = memory_.magnitudes(out), .w_v = memory_.magnitudes(w_v), .out_v = out_v.tensor()},
        kOracle);
    std::vector<double> units = out_v.download();  // |out_v| + sum_d |w_v| |out|
    for (std::size_t i = 0; i < units.size(); ++i) units[i] += std::abs(expected[i]);
    add(compare("out_v", step_.out_v.download(rows_), expected, harness::output_limit(c_.dtype),
                units));
    const Buffer& d_out = memory_.output(DType::f64, {count_, c_.heads, c_.v_dim});
    const Buffer& d_w_v = memory_.sum(DType::f64, {c_.heads, c_.head_dim, c_.v_dim});
    value_projection_backward({.out = out,
                               .w_v = w_v,
                               .d_out_v = rows(step_.d_out_v),
                               .d_out = d_out.tensor(),
                               .d_w_v = d_w_v.tensor()},
                              kOracle);
    add(compare("d_out", step_.d_out.download(rows_), d_out.download(),
                harness::gradient_limit(c_.dtype)));
  }

  void check_loss() {
    const Buffer& loss = memory_.output(DType::f64, {count_});
    const Buffer& d_scores = memory_.output(DType::f64, {count_, c_.index_topk()});
    index_loss({.indices = rows(step_.selected),
                .lengths = rows(step_.selected_lengths),
                .scores = rows(step_.scores),
                .target = rows(step_.target),
                .loss = loss.tensor(),
                .d_scores = d_scores.tensor()},
               kOracle);
    const std::vector<double> expected = loss.download();
    add(compare("loss", step_.loss.download(rows_), expected, harness::loss_limit(DType::f32),
                at_least_one(expected)));
    add(compare("d_scores", step_.d_scores.download(rows_), d_scores.download(),
                harness::loss_gradient_limit()));
  }

  void check_index_backward() {
    const Buffer& d_q = memory_.output(DType::f64, {count_, c_.index_heads, c_.index_dim});
    const Buffer& d_weights = memory_.output(DType::f64, {count_, c_.index_heads});
    const Buffer& d_k = memory_.sum(DType::f64, {c_.index_keys(), c_.index_dim});
    index_topk_backward({.q = rows(step_.index_q),
                         .k = memory_.all(step_.index_k),
                         .weights = rows(step_.weights),
                         .begin = rows(step_.begin),
                         .end = rows(step_.end),
                         .indices = rows(step_.selected),
                         .lengths = rows(step_.selected_lengths),
                         .d_scores = rows(step_.d_scores),
                         .d_q = d_q.tensor(),
                         .d_weights = d_weights.tensor(),
                         .d_k = d_k.tensor()},
                        kOracle);
    const harness::Limit limit = harness::gradient_limit(c_.dtype);
    add(compare("d_index_q", step_.d_index_q.download(rows_), d_q.download(), limit));
    add(compare("d_weights", step_.d_weights.download(rows_), d_weights.download(), limit));
  }

  const TrainingStep& step_;
  const harness::Case& c_;
  const Rows& rows_;
  std::int64_t count_;
  OracleMemory memory_;
  std::vector<Report> reports_;
};

}  // namespace

std::vector<Report> check_rows(const TrainingStep& step, const Rows& rows) {
  return RowCheck(step, rows).run();
}

}  // namespace winnow::tools
