// SPDX-License-Identifier: Apache-2.0
// The memory and the calls of one training step.
#include "harness/training_step.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <utility>

#include "harness/kernel_choice.h"
#include "harness/key_flops.h"

namespace winnow::harness {
namespace {

/// Where documents end, as shares of the batch.
constexpr std::array kDocumentEnds{0.64, 0.86, 0.97, 1.0};

Values constant(double value) {
  return [value](std::int64_t, std::span<double> elements) {
    std::fill(elements.begin(), elements.end(), value);
  };
}

double inverse_root(std::int64_t size) { return 1 / std::sqrt(static_cast<double>(size)); }

/// Slots of one row's list for attention.
std::int64_t slots(const Case& c, const QueryPlace& place) {
  return std::min(place.index_keys, c.index_topk()) +
         std::min<std::int64_t>(place.position + 1, c.window);
}

/// Where documents of c.rows rows begin.
std::vector<std::int32_t> document_offsets(const Case& c) {
  std::vector<std::int32_t> offsets{0};
  for (const double end : kDocumentEnds)
    offsets.push_back(static_cast<std::int32_t>(std::lround(end * static_cast<double>(c.rows))));
  return offsets;
}

/// c.tokens rows, evenly spread; empty: all.
std::vector<std::int32_t> spread_rows(const Case& c) {
  std::vector<std::int32_t> rows;
  for (std::int64_t t = 0; c.tokens < c.rows && t < c.tokens; ++t)
    rows.push_back(static_cast<std::int32_t>((t + 1) * c.rows / c.tokens - 1));
  return rows;
}

}  // namespace

Batch::Batch(const Case& c) : Batch(c, document_offsets(c), {}, spread_rows(c)) {}

Batch::Batch(const Case& c, std::vector<std::int32_t> given_offsets,
             std::vector<std::int32_t> given_padded, std::vector<std::int32_t> given_query_rows)
    : offsets(std::move(given_offsets)),
      padded(std::move(given_padded)),
      query_rows(std::move(given_query_rows)) {
  std::vector<std::int32_t> rows = query_rows;
  if (rows.empty()) {
    rows.resize(static_cast<std::size_t>(c.rows));
    std::iota(rows.begin(), rows.end(), 0);
  }
  for (const std::int32_t row : rows) {
    const auto next = std::upper_bound(begins().begin(), begins().end(), row);
    const std::int64_t position = row - *(next - 1);
    const auto document = next - 1 - begins().begin();
    const bool is_real =
        next != begins().end() && position < offsets[document + 1] - offsets[document];
    places.push_back(is_real ? QueryPlace{position, (position + 1) / c.ratio} : QueryPlace{-1, 0});
  }
}

TrainingStep::TrainingStep(const Case& given, const Batch& given_batch, const Placement& placement,
                           std::uint64_t seed)
    : c(given),
      batch(given_batch),
      buffers(c, placement, seed),
      cu_seqlens(buffers.ints("cu_seqlens", batch.offsets)),
      cu_seqlens_padded(batch.padded.empty() ? buffers.absent()
                                             : buffers.ints("cu_seqlens_padded", batch.padded)),
      query_rows(batch.query_rows.empty() ? buffers.absent()
                                          : buffers.ints("query_rows", batch.query_rows)),
      begin(buffers.query_output("begin", DType::i32, {})),
      end(buffers.query_output("end", DType::i32, {})),
      index_q(buffers.query_input("index_q", c.dtype, {c.index_heads, c.index_dim},
                                  buffers.normal("index q"))),
      index_k(buffers.input("index_k", c.dtype, {c.index_keys(), c.index_dim},
                            buffers.normal("index k"))),
      weights(buffers.query_input(
          "weights", DType::f32, {c.index_heads},
          buffers.normal("index weights", inverse_root(c.index_heads * c.index_dim)))),
      selected(buffers.query_output("selected", DType::i32, {c.index_topk()})),
      selected_lengths(buffers.query_output("selected_lengths", DType::i32, {})),
      scores(buffers.query_output("scores", DType::f32, {c.index_topk()})),
      indices(c.window > 0 ? buffers.query_output("indices", DType::i32, {c.topk})
                           : buffers.alias("indices", "selected")),
      lengths(c.window > 0 ? buffers.query_output("lengths", DType::i32, {})
                           : buffers.alias("lengths", "selected_lengths")),
      q(buffers.query_input("q", c.dtype, {c.heads, c.qk_dim}, buffers.normal("q"))),
      kv(buffers.input("kv", c.dtype, {c.keys(), c.qk_dim}, buffers.normal("kv"))),
      sink(buffers.sink(c)),
      out(buffers.query_output("out", c.dtype, {c.heads, c.v_dim})),
      lse(buffers.query_output("lse", DType::f32, {c.heads})),
      w_v(c.head_dim > 0 ? buffers.input("w_v", c.dtype, {c.heads, c.head_dim, c.v_dim},
                                         buffers.normal("w_v", inverse_root(c.v_dim)))
                         : buffers.absent()),
      out_v(c.head_dim > 0 ? buffers.query_output("out_v", c.dtype, {c.heads, c.head_dim})
                           : buffers.absent()),
      d_out_v(c.head_dim > 0 ? buffers.query_input("d_out_v", c.dtype, {c.heads, c.head_dim},
                                                   buffers.normal("d_out_v"))
                             : buffers.absent()),
      target(buffers.query_output("target", DType::f32, {c.index_topk()})),
      loss(buffers.query_output("loss", DType::f32, {})),
      d_scores(buffers.query_output("d_scores", DType::f32, {c.index_topk()})),
      d_out(c.head_dim > 0 ? buffers.query_output("d_out", c.dtype, {c.heads, c.v_dim})
                           : buffers.query_input("d_out", c.dtype, {c.heads, c.v_dim},
                                                 buffers.normal("d_out"))),
      d_q(buffers.query_output("d_q", c.dtype, {c.heads, c.qk_dim})),
      d_kv(buffers.input("d_kv", DType::f32, {c.keys(), c.qk_dim}, constant(0))),
      d_sink(c.sink ? buffers.input("d_sink", DType::f32, {c.heads}, constant(0))
                    : buffers.absent()),
      d_w_v(c.head_dim > 0
                ? buffers.input("d_w_v", DType::f32, {c.heads, c.head_dim, c.v_dim}, constant(0))
                : buffers.absent()),
      d_index_q(buffers.query_output("d_index_q", c.dtype, {c.index_heads, c.index_dim})),
      d_index_k(buffers.input("d_index_k", DType::f32, {c.index_keys(), c.index_dim}, constant(0))),
      d_weights(buffers.query_output("d_weights", DType::f32, {c.index_heads})),
      windows(buffers.layer_arguments<KeyWindows>()),
      select(buffers.layer_arguments<IndexTopkForward>()),
      lists(buffers.layer_arguments<WindowIndices>()),
      attend(buffers.layer_arguments<SparseAttentionForward>()),
      project(buffers.layer_arguments<ValueProjectionForward>()),
      find_target(buffers.layer_arguments<IndexTarget>()),
      find_loss(buffers.layer_arguments<IndexLoss>()),
      project_backward(buffers.layer_arguments<ValueProjectionBackward>()),
      attend_backward(buffers.layer_arguments<SparseAttentionBackward>()),
      select_backward(buffers.layer_arguments<IndexTopkBackward>()) {
  windows.ratio = c.ratio;
  lists.window = c.window;
  lists.ratio = c.has_pools() ? c.ratio : 0;
  attend.scale = attend_backward.scale = c.scale;
  find_target.scale = c.attention_scale();
  lists.key_offset = find_target.key_offset = c.key_offset();
}

void TrainingStep::clear_sums() {
  for (Buffer* sum : {&d_kv, &d_sink, &d_w_v, &d_index_k})
    if (sum->tensor()) sum->fill(constant(0));
}

void TrainingStep::run(const Execution& execution) const {
  visit_calls([&]<class Args>(const Args& args, double) {
    winnow::run(args, for_operator<Args>(execution));
  });
}

TrainingStep::Flops TrainingStep::flops() const {
  double seen = 0;      // keys of all windows
  double chosen = 0;    // of them selected
  double attended = 0;  // slots of attention
  for (const QueryPlace& place : batch.places) {
    seen += static_cast<double>(place.index_keys);
    chosen += static_cast<double>(std::min(place.index_keys, c.index_topk()));
    attended += static_cast<double>(slots(c, place));
  }
  const KeyFlops each(c);
  const auto queries = static_cast<double>(batch.places.size());
  return {.select = each.score * seen,
          .attend = each.attend * attended,
          .project = each.project * queries,
          .target = each.target * chosen,
          .project_backward = each.project_backward * queries,
          .attend_backward = each.attend_backward * attended,
          .select_backward = each.score_backward * chosen};
}

double flops_per_row(const Case& c) {
  const KeyFlops each(c);
  return each.score * static_cast<double>(c.index_keys()) +
         (each.attend + each.attend_backward) * static_cast<double>(c.topk) +
         (each.target + each.score_backward) * static_cast<double>(c.index_topk()) + each.project +
         each.project_backward;
}

}  // namespace winnow::harness
