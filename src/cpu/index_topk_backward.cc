// SPDX-License-Identifier: Apache-2.0
// The indexer backward, in two passes over a chunk of query rows at a time.
//
// First pass: a task is one query row. Its keys are gathered in blocks; the product a = q . k,
// vectorised over the heads, gives d_weights and g = d_score * weight * [a > 0], from which a
// second product gives d_q. The record of the row keeps one bit per head for a > 0, and its slots
// sorted by range of keys.
//
// Second pass: a task is one range of keys. It recomputes g from the records and adds the rows of
// the product g q to d_k, one query row after another.
//
// Kernel `simd` multiplies floats. Kernel `avx512_bf16` multiplies pairs of bf16. One factor of g
// is rounded to bf16 and summed, d_score in d_q and the weight in d_k; the other one multiplies the
// sum. Rows in which denormals, which count as 0 in products of pairs, or infinities could occur
// are multiplied as floats.
#include <algorithm>
#include <bit>
#include <optional>
#include <span>

#include "backend_operators.h"
#include "core/refusals.h"
#include "core/threads.h"
#include "core/view.h"
#include "cpu/bf16_pairs.h"
#include "cpu/elements.h"
#include "cpu/index_gradient.h"
#include "cpu/index_gradient_scratch.h"
#include "cpu/index_slots.h"
#include "cpu/plan.h"
#include "cpu/simd.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/index_topk_backward.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "cpu/index_query_gradient-inl.h"
#include "cpu/matmul-inl.h"
#include "cpu/pack-inl.h"
#include "cpu/widen-inl.h"

HWY_BEFORE_NAMESPACE();
namespace winnow::cpu::HWY_NAMESPACE {

std::int64_t sign_bytes_of(std::int64_t heads) {
  return ceil_div(heads, kLanes) * kVectorSignBytes;
}

/// Epilogue: adds the rows of a product to the rows of d_k that `keys` gives, one after another,
/// since a key may appear in several slots.
struct AddToKeys {
  float* sums;
  std::int64_t stride;
  const std::int32_t* keys;

  AddToKeys at(std::int64_t row, std::int64_t column) const {
    return {sums + column, stride, keys + row};
  }
  HWY_INLINE void operator()(int row, int v, FloatVector sum) const {
    const FloatTag d;
    float* const to = sums + keys[row] * stride + v * kLanes;
    hn::StoreU(hn::Add(hn::LoadU(d, to), sum), d, to);
  }
};

/// The same, each row times a factor.
struct AddScaledToKeys {
  AddToKeys add;
  const float* factors;

  AddScaledToKeys at(std::int64_t row, std::int64_t column) const {
    return {add.at(row, column), factors + row};
  }
  HWY_INLINE void operator()(int row, int v, FloatVector sum) const {
    add(row, v, hn::Mul(hn::Set(FloatTag(), factors[row]), sum));
  }
};

/// Recomputes g of the slots in `block` from the recorded signs, and adds the product g q to `add`.
void add_slots(const IndexGradientPlan& plan, const RowRecord& record, const SlotBlock& block,
               const KeyGradientScratch<float>& row, const AddToKeys& add) {
  const FloatTag d;
  float* const g = row.factors;
  for (std::int64_t i = 0; i < block.count; ++i) {
    const std::uint8_t* signs = record.signs + block.slots[i] * plan.sign_bytes;
    const auto d_score = hn::Set(d, block.d_scores[i]);
    for (std::int64_t h = 0; h < plan.heads; h += kLanes, signs += kVectorSignBytes) {
      const auto scaled = hn::Mul(d_score, hn::LoadU(d, row.weights.data() + h));
      hn::StoreU(hn::IfThenElseZero(load_signs(d, signs), scaled), d,
                 g + i * row.factor_stride + h);
    }
  }
  if (*record.is_finite) {
    return multiply(KMajor<float>{g, row.factor_stride}, block.count, row.q, plan.row_stride,
                    plan.dim, plan.heads, add);
  }
  for (std::int64_t j = 0; j < block.count; ++j) {
    for (std::int64_t h = 0; h < plan.heads; ++h) {
      if (!was_positive(record.signs + block.slots[j] * plan.sign_bytes, h)) continue;
      add_scaled(add.sums + block.keys[j] * add.stride, g[j * row.factor_stride + h],
                 row.q + h * plan.row_stride, plan.dim);
    }
  }
}

/// The same in pairs of neighbouring heads: of g the product has the weights alone.
inline void add_slots(const IndexGradientPlan& plan, const RowRecord& record,
                      const SlotBlock& block, const KeyGradientScratch<Bf16Pair>& row,
                      const AddToKeys& add) {
  const hn::Rebind<std::uint16_t, FloatTag> d;
  const auto* const weights = reinterpret_cast<const std::uint16_t*>(row.weights.data());
  for (std::int64_t i = 0; i < block.count; ++i) {
    const std::uint8_t* signs = record.signs + block.slots[i] * plan.sign_bytes;
    auto* const to = reinterpret_cast<std::uint16_t*>(row.factors + i * row.factor_stride);
    for (std::int64_t h = 0; h < plan.heads; h += kLanes, signs += kVectorSignBytes)
      hn::StoreU(hn::IfThenElseZero(load_signs(d, signs), hn::LoadU(d, weights + h)), d, to + h);
  }
  multiply(KMajor<Bf16Pair>{row.factors, row.factor_stride}, block.count, row.q, plan.row_stride,
           plan.dim, row.depth, AddScaledToKeys{add, block.d_scores});
}

/// Adds the gradients of query row t to the keys of a range, which begins at key `begin`.
template <class Element>
void add_row(const IndexTopkBackward& args, const IndexGradientPlan& plan, std::int64_t t,
             const RowRecord& record, std::int64_t range, const KeyGradientScratch<Element>& row,
             float* sums, std::int64_t stride) {
  std::int64_t next = record.offsets[range];
  const std::int64_t end = record.offsets[range + 1];
  const std::int64_t begin = range << plan.range_shift;
  const RowSlots slots(args, t);
  load_weights(args, t, row.weights);
  load_depth(slice(args.q, t), 0, plan.heads, row.q, plan.row_stride);
  SlotBlock block;
  while (next < end) {
    block.count = 0;
    for (; next < end && block.count < kSlotBlock; ++next) {
      slots.append(record.slots[next], block);
      block.keys[block.count - 1] -= static_cast<std::int32_t>(begin);
    }
    add_slots(plan, record, block, row, {sums, stride, block.keys});
  }
}

/// The second pass for the query rows [first, first + rows) and one range of keys.
void key_gradient(const IndexTopkBackward& args, const IndexGradientPlan& plan, std::int64_t first,
                  std::int64_t rows, std::byte* records, std::int64_t range, Scratch scratch) {
  const std::int64_t begin = range << plan.range_shift;
  const std::int64_t count =
      std::min(std::int64_t{1} << plan.range_shift, args.d_k.shape[0] - begin);
  const KeyGradientScratch<float> floats(plan, scratch);
  std::optional<KeyGradientScratch<Bf16Pair>> pairs;
  if (plan.with_pairs) pairs.emplace(plan, scratch);
  // The epilogue adds whole vectors, so rows that end within a vector are accumulated in a copy.
  const bool is_copied = plan.dim % kPanelColumns != 0;
  const auto copy = scratch.take<float>(is_copied ? count * plan.row_stride : 0);
  const std::int64_t stride = is_copied ? plan.row_stride : args.d_k.stride[0];
  float* const sums = is_copied ? copy.data() : static_cast<float*>(row_of(args.d_k, begin));
  if (is_copied) load_rows(args.d_k, begin, count, sums, stride);

  for (std::int64_t i = 0; i < rows; ++i) {
    const RowRecord record(plan, records + static_cast<std::size_t>(i) * plan.record_bytes);
    if (record.offsets[range] == record.offsets[range + 1]) continue;
    const auto add = [&](const auto& row) {
      add_row(args, plan, first + i, record, range, row, sums, stride);
    };
    if constexpr (kMultipliesPairs) {
      if (*record.are_pairs) {
        add(*pairs);
        continue;
      }
    }
    add(floats);
  }
  if (!is_copied) return;
  for (std::int64_t s = 0; s < count; ++s)
    std::copy_n(sums + s * stride, plan.dim, static_cast<float*>(row_of(args.d_k, begin + s)));
}

void round_row(const Tensor& sums, const Tensor& d_keys, std::int64_t s) {
  narrow_row(d_keys.dtype, static_cast<const float*>(row_of(sums, s)), 1.0f, row_of(d_keys, s),
             d_keys.shape[1]);
}

}  // namespace winnow::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace winnow::cpu {

HWY_EXPORT(sign_bytes_of);
HWY_EXPORT(query_gradient);
HWY_EXPORT(key_gradient);
HWY_EXPORT(round_row);

IndexGradientPlan::IndexGradientPlan(const IndexTopkBackward& args, bool with_pairs,
                                     const Execution& execution)
    : with_pairs(with_pairs),
      heads(args.q.shape[1]),
      dim(args.q.shape[2]),
      topk(args.indices.shape[1]),
      row_stride(padded_stride(dim)),
      head_stride(padded_stride(heads)),
      sign_bytes(HWY_DYNAMIC_DISPATCH(sign_bytes_of)(heads)) {
  // Few ranges, since each loads every query row that has a key in it; but enough for
  // all threads, and small enough that a range of d_k stays in cache: 1 MiB at dim 128.
  constexpr std::int64_t kMinKeys = 64, kMaxKeys = 2048, kMaxRanges = 256;
  const std::int64_t keys = args.k.shape[0];
  const std::int64_t balanced = ceil_div(keys, 4 * std::int64_t{thread_count(execution)});
  const auto keys_per_range = static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(
      std::max(std::clamp(balanced, kMinKeys, kMaxKeys), ceil_div(keys, kMaxRanges)))));
  range_shift = std::countr_zero(static_cast<std::uint64_t>(keys_per_range));
  ranges = ceil_div(keys, keys_per_range);

  record_bytes = RowRecord::bytes(*this);
  const std::int64_t copied_keys = dim % kColumnPadding == 0 ? 0 : keys_per_range;
  lane_bytes = gradient_scratch_bytes(*this, copied_keys, may_have_pairs(args));
  min_bytes = record_bytes + lane_bytes;

  const std::int64_t tokens = std::max<std::int64_t>(args.q.shape[0], 1);
  const std::size_t limit = execution.workspace_limit;
  const std::size_t for_records = std::min(limit / 2, limit - std::min(limit, lane_bytes));
  chunk_rows =
      std::clamp<std::int64_t>(static_cast<std::int64_t>(for_records / record_bytes), 1, tokens);
  Execution lanes = execution;
  const std::size_t all_record_bytes = static_cast<std::size_t>(chunk_rows) * record_bytes;
  lanes.workspace_limit -= std::min(lanes.workspace_limit, all_record_bytes);
  bytes = all_record_bytes + all_lanes_bytes(lanes, lane_bytes);
}

void index_gradient(const IndexTopkBackward& args, const IndexGradientPlan& plan,
                    const Execution& execution) {
  auto* const records = static_cast<std::byte*>(execution.workspace);
  const std::size_t all_record_bytes =
      static_cast<std::size_t>(plan.chunk_rows) * plan.record_bytes;
  Execution lanes = execution;
  lanes.workspace = records + all_record_bytes;
  lanes.workspace_bytes -= all_record_bytes;
  const std::int64_t tokens = args.q.shape[0];
  for (std::int64_t first = 0; first < tokens; first += plan.chunk_rows) {
    const std::int64_t rows = std::min(plan.chunk_rows, tokens - first);
    parallel_for(lanes, rows, plan.lane_bytes, [&](std::int64_t i, Scratch scratch) {
      const RowRecord row(plan, records + static_cast<std::size_t>(i) * plan.record_bytes);
      HWY_DYNAMIC_DISPATCH(query_gradient)(args, plan, first + i, row, scratch);
    });
    parallel_for(lanes, plan.ranges, plan.lane_bytes, [&](std::int64_t range, Scratch scratch) {
      HWY_DYNAMIC_DISPATCH(key_gradient)(args, plan, first, rows, records, range, scratch);
    });
  }
}

std::size_t KeySums::bytes(const Tensor& d_keys) {
  return d_keys.dtype == DType::f32 ? 0 : Scratch::bytes<float>(d_keys.shape[0] * d_keys.shape[1]);
}

KeySums::KeySums(const Tensor& d_keys, const Execution& execution)
    : sums(d_keys), rest(execution), d_keys_(d_keys) {
  if (d_keys.dtype == DType::f32) return;
  sums = tensor(execution.workspace, DType::f32, {d_keys.shape[0], d_keys.shape[1]});
  rest.workspace = static_cast<std::byte*>(execution.workspace) + bytes(d_keys);
  rest.workspace_bytes -= bytes(d_keys);
  for_rows(rest, sums.shape[0], [&](std::int64_t s) {
    std::fill_n(static_cast<float*>(sums.data) + s * sums.stride[0], sums.shape[1], 0.0f);
  });
}

void KeySums::finish() const {
  if (d_keys_.dtype == DType::f32) return;
  for_rows(rest, sums.shape[0], [&](std::int64_t s) {
    HWY_DYNAMIC_DISPATCH(round_row)(sums, d_keys_, s);
  });
}

namespace {

void run_passes(const IndexTopkBackward& args, bool with_pairs, const Execution& execution) {
  const KeySums d_k(args.d_k, execution);
  IndexTopkBackward summed = args;
  summed.d_k = d_k.sums;
  index_gradient(summed, IndexGradientPlan(args, with_pairs, execution), d_k.rest);
  d_k.finish();
}

}  // namespace

std::string why_not(const IndexTopkBackward& args, const Execution& execution) {
  if (args.q.dtype == DType::f64) return refusal::no_f64;
  return over_limit(IndexGradientPlan(args, false, execution).min_bytes, execution);
}
std::string why_not_pairs(const IndexTopkBackward& args) { return why_not_pairs_of(args.q.dtype); }

std::size_t workspace_bytes(const IndexTopkBackward& args, const Execution& execution) {
  return KeySums::bytes(args.d_k) + IndexGradientPlan(args, false, execution).bytes;
}

void run(const IndexTopkBackward& args, const Execution& execution) {
  run_passes(args, false, execution);
}
void run_pairs(const IndexTopkBackward& args, const Execution& execution) {
  run_passes(args, true, execution);
}

}  // namespace winnow::cpu
#endif
