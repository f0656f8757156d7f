// SPDX-License-Identifier: Apache-2.0
// The indexer forward: scores with exact top-k selection, and replay of given indices.
//
// Selection: a task packs a few query rows and goes through the keys of their windows panel by
// panel. Each panel stays in L1 while it is scored against all rows of the task, and the
// Selection of every row keeps the candidates. If there are fewer such tasks than threads, the keys
// are split into parts, and the selections of the parts are merged. Replay: a task is one row,
// whose keys are gathered.
//
// Kernel `simd` multiplies floats. Kernel `avx512_bf16` multiplies pairs of bf16, but floats
// where denormals, which count as 0 in products of pairs, could occur. Which of the two depends on
// the query row and the key alone, as their score does. bf16 holds fp8 exactly; there the key's
// scale is a factor of the score, where it is not negative and neither the scale nor a weight is
// extreme.
#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <limits>
#include <optional>
#include <span>
#include <vector>

#include "backend_operators.h"
#include "core/refusals.h"
#include "core/threads.h"
#include "core/view.h"
#include "cpu/bf16_pairs.h"
#include "cpu/elements.h"
#include "cpu/index_topk_plan.h"
#include "cpu/plan.h"
#include "cpu/simd.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/index_topk.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "cpu/index_scores-inl.h"
#include "cpu/select-inl.h"

HWY_BEFORE_NAMESPACE();
namespace winnow::cpu::HWY_NAMESPACE {

inline constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

/// The weights of a row and the scales of keys for which the scale may be a factor of the score of
/// fp8, not of the channels: in between nothing overflows or becomes denormal, since products of
/// fp8 lie between 2^-18 and 2^18.
inline constexpr float kLargestWeight = 0x1p60f;
inline constexpr float kLargestScale = 0x1p40f;

/// Whether a weight or scale is 0 or between the largest of these and its reciprocal.
inline bool commutes(float factor, float largest) {
  const float magnitude = std::abs(factor);
  return magnitude == 0 || (magnitude >= 1 / largest && magnitude <= largest);
}

/// One query row of a task. Of elements that are not needed there is memory alone.
class IndexQuery {
 public:
  IndexQuery(const IndexTopkForward& args, const IndexForwardPlan& plan, std::int64_t t,
             Scratch& scratch)
      : args_(&args),
        t_(t),
        floats_(scratch.take<float>(plan.heads * plan.stride<float>())),
        weights_(scratch.take<float>(plan.heads)) {
    widen_row(DType::f32, row_of(args.weights, t), weights_.data(), plan.heads);
    if (!plan.with_pairs) return;
    const std::int64_t stride = plan.stride<Bf16Pair>();
    pairs_ = scratch.take<Bf16Pair>(plan.heads * stride);
    for (std::int64_t h = 0; h < plan.heads; ++h) {
      load_index_pairs(args.q.dtype, row_of(args.q, t, h), pairs_.data() + h * stride, plan.dim,
                       floats_.data());
    }
    suits_pairs_ = least_magnitude(pairs_.data(), stride, plan.heads,
                                   elements_of<Bf16Pair>(plan.dim)) >= kLeastMagnitude;
    for (const float weight : weights_)
      suits_pairs_ = suits_pairs_ && (!args.k_scale || commutes(weight, kLargestWeight));
  }
  bool suits_pairs() const { return suits_pairs_; }
  const float* weights() const { return weights_.data(); }
  const Bf16Pair* pairs() const { return pairs_.data(); }
  const float* floats(const IndexForwardPlan& plan) {
    const std::int64_t stride = plan.stride<float>();
    for (std::int64_t h = 0; !has_floats_ && h < plan.heads; ++h) {
      widen_index_row(args_->q.dtype, row_of(args_->q, t_, h), floats_.data() + h * stride,
                      plan.dim);
    }
    has_floats_ = true;
    return floats_.data();
  }

 private:
  const IndexTopkForward* args_;
  std::int64_t t_;
  std::span<float> floats_;    // [heads, stride]
  std::span<float> weights_;   // [heads]
  std::span<Bf16Pair> pairs_;  // [heads, stride]
  bool suits_pairs_ = false;
  bool has_floats_ = false;
};

/// Keys as rows, and transposed to a panel.
template <class Element>
struct PanelOf {
  PanelOf(const IndexForwardPlan& plan, Scratch& scratch)
      : stride(plan.stride<Element>()),
        depth(elements_of<Element>(plan.dim)),
        rows(scratch.take<Element>(kColumnPadding * stride)),
        panel(scratch.take<Element>(kColumnPadding * depth)) {}

  Element* row(std::int64_t i) const { return rows.data() + i * stride; }
  void transpose() const { transpose_to_panel(rows.data(), stride, depth, panel.data()); }

  std::int64_t stride, depth;
  std::span<Element> rows;   // [kColumnPadding, stride]
  std::span<Element> panel;  // [depth, kPanelColumns]
};

/// The keys that are scored together.
class KeyPanel {
 public:
  KeyPanel(const IndexTopkForward& args, const IndexForwardPlan& plan, Scratch& scratch)
      : args_(args),
        plan_(plan),
        floats_(plan, scratch),
        products_(scratch.take<float>(kColumnPadding * plan.heads)),
        scores_(scratch.take<float>(kColumnPadding)),
        scores_of_floats_(scratch.take<float>(kColumnPadding)) {
    if (plan.with_pairs) pairs_.emplace(plan, scratch);
  }

  /// Loads the keys key_of(i) for i in [0, kPanelColumns); a negative key gives a column of zeros.
  template <class KeyOf>
  void load(const KeyOf& key_of) {
    for (std::int64_t i = 0; i < kPanelColumns; ++i) keys_[i] = key_of(i);
    has_floats_ = false;
    if (plan_.with_pairs) load_pairs();
  }
  void score(IndexQuery& query) {
    if constexpr (kMultipliesPairs) {
      if (query.suits_pairs()) {
        score_panel(query.pairs(), pairs_->stride, query.weights(), plan_.heads, pairs_->depth,
                    pairs_->panel.data(), products_.data(), scores_.data());
        if (args_.k_scale) {
          for (std::int64_t i = 0; i < kPanelColumns; ++i) scores_[i] *= scales_[i];
        }
        if (all_suit_pairs_) return;
        score_floats(query, scores_of_floats_.data());
        for (std::int64_t i = 0; i < kPanelColumns; ++i) {
          if (!suits_pairs_[i]) scores_[i] = scores_of_floats_[i];
        }
        return;
      }
    }
    score_floats(query, scores_.data());
  }
  const float* scores() const { return scores_.data(); }

 private:
  void load_pairs() {
    for (std::int64_t i = 0; i < kPanelColumns; ++i) {
      Bf16Pair* const row = pairs_->row(i);
      if (keys_[i] < 0) {
        std::fill_n(row, padded_columns(pairs_->depth), Bf16Pair{});
      } else {
        load_index_pairs(args_.k.dtype, row_of(args_.k, keys_[i]), row, plan_.dim, floats_.row(i));
      }
      scales_[i] = args_.k_scale && keys_[i] >= 0 ? scale_of(args_.k_scale, keys_[i]) : 1.0f;
      // No fp8 is small.
      const bool is_fp8 = args_.k.dtype == DType::f8_e4m3;
      suits_pairs_[i] = (is_fp8 || least_magnitude(row, 0, 1, pairs_->depth) >= kLeastMagnitude) &&
                        scales_[i] >= 0 && commutes(scales_[i], kLargestScale);
    }
    pairs_->transpose();
    all_suit_pairs_ = std::all_of(suits_pairs_.begin(), suits_pairs_.end(), std::identity());
  }
  void score_floats(IndexQuery& query, float* scores) {
    if (!has_floats_) {
      for (std::int64_t i = 0; i < kPanelColumns; ++i) {
        if (keys_[i] < 0) {
          std::fill_n(floats_.row(i), plan_.dim, 0.0f);
        } else {
          widen_key(args_.k, args_.k_scale, keys_[i], floats_.row(i));
        }
      }
      floats_.transpose();
      has_floats_ = true;
    }
    score_panel(query.floats(plan_), floats_.stride, query.weights(), plan_.heads, floats_.depth,
                floats_.panel.data(), products_.data(), scores);
  }

  const IndexTopkForward& args_;
  const IndexForwardPlan& plan_;
  std::array<std::int64_t, kPanelColumns> keys_;
  std::array<float, kPanelColumns> scales_;
  std::array<bool, kPanelColumns> suits_pairs_;
  bool all_suit_pairs_ = false;
  bool has_floats_ = false;
  PanelOf<float> floats_;
  std::optional<PanelOf<Bf16Pair>> pairs_;
  std::span<float> products_;          // [heads, kPanelColumns]
  std::span<float> scores_;            // [kPanelColumns]
  std::span<float> scores_of_floats_;  // [kPanelColumns]
};

std::span<RankedSlot> ranked_slots(const IndexTopkForward& args, const IndexForwardPlan& plan,
                                   Scratch& scratch) {
  return scratch.take<RankedSlot>(args.order == SlotOrder::by_score ? plan.selection.topk : 0);
}

/// Writes row t of the outputs.
void write_selected(const IndexTopkForward& args, std::int64_t t, Selection& selection,
                    std::span<RankedSlot> ranked) {
  const std::int64_t count = selection.finish();
  const std::int64_t topk = args.indices.shape[1];
  auto* const indices = static_cast<std::int32_t*>(row_of(args.indices, t));
  auto* const scores = args.scores ? static_cast<float*>(row_of(args.scores, t)) : nullptr;
  if (args.order == SlotOrder::by_score) {
    for (std::int64_t j = 0; j < count; ++j) {
      const auto key = static_cast<std::uint32_t>(sort_key(selection.scores()[j] + 0.0f));
      ranked[j] = std::uint64_t{0x7fffffffu - key} << 32 | static_cast<std::uint64_t>(j);
    }
    std::sort(ranked.begin(), ranked.begin() + count);
    for (std::int64_t j = 0; j < count; ++j) {
      const auto from = static_cast<std::uint32_t>(ranked[j]);
      indices[j] = selection.keys()[from];
      if (scores != nullptr) scores[j] = selection.scores()[from];
    }
  } else {
    std::copy_n(selection.keys(), count, indices);
    if (scores != nullptr) std::copy_n(selection.scores(), count, scores);
  }
  std::fill(indices + count, indices + topk, -1);
  if (scores != nullptr) std::fill(scores + count, scores + topk, kMinusInfinity);
  if (args.lengths) View<std::int32_t, 1>(args.lengths)(t) = static_cast<std::int32_t>(count);
}

/// One query row of a selection task, with its window.
struct SelectedRow {
  IndexQuery query;
  Selection selection;
  std::int64_t begin, end;
  std::int64_t* count;  // output: the number selected, if the keys are split into parts
};

SelectedRow load_row(const IndexTopkForward& args, const IndexForwardPlan& plan, std::int64_t t,
                     std::int64_t part, const Execution& execution, Scratch& scratch) {
  const IndexQuery query(args, plan, t, scratch);
  const std::int64_t begin = View<const std::int32_t, 1>(args.begin)(t);
  const std::int64_t end = View<const std::int32_t, 1>(args.end)(t);
  if (plan.parts == 1) return {query, Selection(plan.selection, scratch), begin, end, nullptr};
  Scratch kept = plan.part_of(execution, t, part);
  std::int64_t* const count = kept.take<std::int64_t>(1).data();
  return {query, Selection(plan.selection, kept), begin, end, count};
}

/// Runs task i of selection: group i / parts and part i % parts of its keys.
void select_rows(const IndexTopkForward& args, const IndexForwardPlan& plan,
                 const Execution& execution, std::int64_t i, Scratch scratch) {
  const std::int64_t first = i / plan.parts * plan.rows;
  const std::int64_t last = std::min(first + plan.rows, plan.tokens);
  const std::int64_t part = i % plan.parts;
  const std::span<RankedSlot> ranked = ranked_slots(args, plan, scratch);
  KeyPanel keys(args, plan, scratch);
  std::vector<SelectedRow> selected;
  std::int64_t first_key = args.k.shape[0];
  std::int64_t last_key = 0;
  for (std::int64_t t = first; t < last; ++t) {
    const SelectedRow& row =
        selected.emplace_back(load_row(args, plan, t, part, execution, scratch));
    if (row.begin == row.end) continue;
    first_key = std::min(first_key, row.begin);
    last_key = std::max(last_key, row.end);
  }
  if (plan.parts > 1 && first_key < last_key) {
    const std::int64_t size = last_key - first_key;
    last_key = first_key + size * (part + 1) / plan.parts;
    first_key += size * part / plan.parts;
  }

  for (std::int64_t s = first_key; s < last_key; s += kPanelColumns) {
    const std::int64_t panel_end = std::min(s + kPanelColumns, last_key);
    bool is_loaded = false;
    for (SelectedRow& row : selected) {
      const std::int64_t from = std::max(row.begin, s);
      const std::int64_t to = std::min(row.end, panel_end);
      if (from >= to) continue;
      if (!is_loaded) {
        keys.load([&](std::int64_t j) { return s + j < panel_end ? s + j : -1; });
        is_loaded = true;
      }
      keys.score(row.query);
      row.selection.add(keys.scores(), s, from - s, to - s);
    }
  }
  for (std::int64_t t = first; t < last; ++t) {
    SelectedRow& row = selected[static_cast<std::size_t>(t - first)];
    if (plan.parts == 1) {
      write_selected(args, t, row.selection, ranked);
    } else {
      *row.count = row.selection.finish();
    }
  }
}

/// Selects row t from the selections of the parts of its keys.
void merge_parts(const IndexTopkForward& args, const IndexForwardPlan& plan,
                 const Execution& execution, std::int64_t t, Scratch scratch) {
  const std::span<RankedSlot> ranked = ranked_slots(args, plan, scratch);
  Selection selection(plan.selection, scratch);
  for (std::int64_t part = 0; part < plan.parts; ++part) {
    Scratch kept = plan.part_of(execution, t, part);
    const std::int64_t count = kept.take<std::int64_t>(1)[0];
    const Selection selected(plan.selection, kept);
    selection.add(selected.scores(), selected.keys(), count);
  }
  write_selected(args, t, selection, ranked);
}

/// Computes row t of replay.
void replay_row(const IndexTopkForward& args, const IndexForwardPlan& plan, const Execution&,
                std::int64_t t, Scratch scratch) {
  const View<const std::int32_t, 1> begin(args.begin);
  const View<const std::int32_t, 1> end(args.end);
  const View<const std::int32_t, 1> lengths(args.lengths);
  const auto* const indices = static_cast<const std::int32_t*>(row_of(args.indices, t));
  auto* const scores = static_cast<float*>(row_of(args.scores, t));
  const std::int64_t length = lengths ? lengths(t) : plan.topk;
  IndexQuery query(args, plan, t, scratch);
  KeyPanel keys(args, plan, scratch);
  for (std::int64_t j = 0; j < length; j += kPanelColumns) {
    const auto key_of = [&](std::int64_t i) -> std::int64_t {
      const std::int64_t s = j + i < length ? indices[j + i] : -1;
      return s >= begin(t) && s < end(t) ? s : -1;
    };
    keys.load(key_of);
    keys.score(query);
    for (std::int64_t i = 0; i < std::min(kPanelColumns, length - j); ++i)
      scores[j + i] = key_of(i) < 0 ? kMinusInfinity : keys.scores()[i];
  }
  std::fill(scores + length, scores + plan.topk, kMinusInfinity);
}

}  // namespace winnow::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace winnow::cpu {

HWY_EXPORT(select_rows);
HWY_EXPORT(merge_parts);
HWY_EXPORT(replay_row);

namespace {

void run_plan(const IndexTopkForward& args, bool with_pairs, const Execution& execution) {
  const IndexForwardPlan plan(args, with_pairs, execution);
  Execution lanes = execution;
  lanes.workspace = static_cast<std::byte*>(execution.workspace) + plan.parts_bytes();
  lanes.workspace_bytes -= plan.parts_bytes();
  const auto run_tasks = [&](auto task, std::int64_t count) {
    parallel_for(lanes, count, plan.scratch_bytes(),
                 [&](std::int64_t i, Scratch scratch) { task(args, plan, execution, i, scratch); });
  };
  if (args.replay) return run_tasks(HWY_DYNAMIC_DISPATCH(replay_row), plan.tokens);
  run_tasks(HWY_DYNAMIC_DISPATCH(select_rows), plan.groups() * plan.parts);
  if (plan.parts > 1) run_tasks(HWY_DYNAMIC_DISPATCH(merge_parts), plan.tokens);
}

}  // namespace

std::string why_not(const IndexTopkForward& args, const Execution& execution) {
  if (args.q.dtype == DType::f64) return refusal::no_f64;
  const IndexForwardPlan plan(args, false, execution);
  return over_limit(plan.fixed_bytes + plan.row_bytes, execution);
}
std::string why_not_pairs(const IndexTopkForward& args) {
  return why_not_pairs_of(args.q.dtype, {DType::bf16, DType::f8_e4m3});
}
std::size_t workspace_bytes(const IndexTopkForward& args, const Execution& execution) {
  const IndexForwardPlan plan(args, false, execution);
  return plan.parts_bytes() + all_lanes_bytes(execution, plan.scratch_bytes());
}
void run(const IndexTopkForward& args, const Execution& execution) {
  run_plan(args, false, execution);
}
void run_pairs(const IndexTopkForward& args, const Execution& execution) {
  run_plan(args, true, execution);
}

}  // namespace winnow::cpu
#endif
