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
#include <algorithm>
#include <bit>
#include <cstring>
#include <span>

#include "backend_operators.h"
#include "core/refusals.h"
#include "core/threads.h"
#include "core/view.h"
#include "cpu/index_gradient.h"
#include "cpu/index_slots.h"
#include "cpu/plan.h"
#include "cpu/simd.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/index_topk_backward.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "cpu/index_scores-inl.h"
#include "cpu/matmul-inl.h"
#include "cpu/pack-inl.h"

HWY_BEFORE_NAMESPACE();
namespace winnow::cpu::HWY_NAMESPACE {

/// Bytes that hold one bit per lane of a vector.
inline constexpr std::int64_t kVectorSignBytes = (kLanes + 7) / 8;

std::int64_t sign_bytes_of(std::int64_t heads) {
  return ceil_div(heads, kLanes) * kVectorSignBytes;
}

bool is_finite(std::span<const float> values) {
  std::uint32_t largest = 0;
  for (const float value : values)
    largest = std::max(largest, std::bit_cast<std::uint32_t>(value) & 0x7fffffffu);
  return largest < 0x7f800000u;
}

/// Loads weights[t], padded with zeros to whole vectors.
void load_weights(const IndexTopkBackward& args, std::int64_t t, std::span<float> weights) {
  std::fill(weights.begin(), weights.end(), 0.0f);
  widen_row(DType::f32, row_of(args.weights, t), weights.data(), args.weights.shape[1]);
}

/// Epilogue of a [slots, heads]: records the signs, writes g, adds to d_weights. `nan_probe`
/// becomes NaN if a key is not finite, since then a is not finite for any head.
struct GradientEpilogue {
  const SlotBlock* block;
  const float* weights;
  float* g;
  std::int64_t head_stride;
  float* d_weights;
  float* nan_probe;
  std::uint8_t* signs;
  std::int64_t sign_bytes;
  std::int64_t first_slot;

  GradientEpilogue at(std::int64_t row, std::int64_t column) const {
    return {block,
            weights + column,
            g + row * head_stride + column,
            head_stride,
            d_weights + column,
            nan_probe,
            signs + column / kLanes * kVectorSignBytes,
            sign_bytes,
            first_slot + row};
  }
  HWY_INLINE void operator()(int row, int v, FloatVector a) const {
    const FloatTag d;
    const auto d_score = hn::Set(d, block->d_scores[first_slot + row]);
    const auto is_positive = hn::Gt(a, hn::Zero(d));
    const auto scaled = hn::Mul(d_score, hn::LoadU(d, weights + v * kLanes));
    hn::StoreU(hn::IfThenElseZero(is_positive, scaled), d, g + row * head_stride + v * kLanes);
    float* const d_weight = d_weights + v * kLanes;
    hn::StoreU(hn::MulAdd(d_score, relu(a), hn::LoadU(d, d_weight)), d, d_weight);
    std::uint8_t bits[8];
    hn::StoreMaskBits(d, is_positive, bits);
    std::memcpy(signs + block->slots[first_slot + row] * sign_bytes + v * kVectorSignBytes, bits,
                kVectorSignBytes);
    if (v == 0) hn::StoreU(hn::MulAdd(a, hn::Zero(d), hn::LoadU(d, nan_probe)), d, nan_probe);
  }
};

/// Whether a > 0 was recorded for head h.
bool was_positive(const std::uint8_t* signs, std::int64_t h) {
  return (signs[h / kLanes * kVectorSignBytes + h % kLanes / 8] >> (h % kLanes % 8) & 1) != 0;
}

/// target[d] += factor * source[d]. Used where `source` has NaN or infinities: there a matrix
/// product would turn a g of 0 into NaN.
void add_scaled(float* target, float factor, const float* source, std::int64_t dim) {
  for (std::int64_t d = 0; d < dim; ++d) target[d] += factor * source[d];
}

/// The first pass for query row t.
void query_gradient(const IndexTopkBackward& args, const IndexGradientPlan& plan, std::int64_t t,
                    const RowRecord& record, Scratch scratch) {
  const auto q = scratch.take<float>(plan.dim * plan.head_stride);  // [dim, heads]
  const auto weights = scratch.take<float>(plan.head_stride);
  const auto d_weights = scratch.take<float>(plan.head_stride);
  const auto keys = scratch.take<float>(kSlotBlock * plan.row_stride);
  const auto g = scratch.take<float>(kSlotBlock * plan.head_stride);
  const auto d_q = scratch.take<float>(plan.heads * plan.row_stride);
  const auto transpose_scratch = scratch.take<float>(4 * plan.row_stride);
  const auto nan_probe = scratch.take<float>(kColumnPadding);
  transpose_rows(slice(args.q, t), 0, plan.heads, q.data(), plan.head_stride,
                 transpose_scratch.data());
  load_weights(args, t, weights);
  std::fill(d_weights.begin(), d_weights.end(), 0.0f);
  std::fill(d_q.begin(), d_q.end(), 0.0f);
  *record.is_finite = true;
  for (std::int64_t d = 0; d < plan.dim; ++d)
    *record.is_finite &= is_finite(q.subspan(d * plan.head_stride, plan.heads));

  RowSlots slots(args, t);
  sort_slots_by_range(slots, plan, record);
  SlotBlock block;
  for (slots.next_block(block); block.count > 0; slots.next_block(block)) {
    gather_rows(args.k, block.keys, block.count, keys.data(), plan.row_stride);
    std::fill(nan_probe.begin(), nan_probe.end(), 0.0f);
    const KMajor key_rows{keys.data(), plan.row_stride};
    const GradientEpilogue epilogue{&block,           weights.data(),   g.data(),
                                    plan.head_stride, d_weights.data(), nan_probe.data(),
                                    record.signs,     plan.sign_bytes,  0};
    if (plan.dim <= kMaxUnblockedDim) {
      multiply(key_rows, block.count, q.data(), plan.head_stride, plan.heads, plan.dim, epilogue);
    } else {
      multiply_blocked(key_rows, block.count, q.data(), plan.head_stride, plan.heads, plan.dim,
                       g.data(), plan.head_stride, false, kBlockDim);
      for (std::int64_t h = 0; h < plan.heads; h += kLanes) {
        for (std::int64_t i = 0; i < block.count; ++i) {
          const auto a = hn::LoadU(FloatTag(), g.data() + i * plan.head_stride + h);
          epilogue.at(i, h)(0, 0, a);
        }
      }
    }
    if (is_finite(nan_probe)) {
      multiply(MnMajor{g.data(), plan.head_stride}, plan.heads, keys.data(), plan.row_stride,
               plan.dim, block.count, AddTo{d_q.data(), plan.row_stride});
      continue;
    }
    for (std::int64_t i = 0; i < block.count; ++i) {
      for (std::int64_t h = 0; h < plan.heads; ++h) {
        if (!was_positive(record.signs + block.slots[i] * plan.sign_bytes, h)) continue;
        add_scaled(d_q.data() + h * plan.row_stride, g[i * plan.head_stride + h],
                   keys.data() + i * plan.row_stride, plan.dim);
      }
    }
  }
  for (std::int64_t h = 0; h < plan.heads; ++h) {
    narrow_row(args.d_q.dtype, d_q.data() + h * plan.row_stride, 1.0f, row_of(args.d_q, t, h),
               plan.dim);
  }
  std::copy_n(d_weights.data(), plan.heads, static_cast<float*>(row_of(args.d_weights, t)));
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

/// Recomputes g [slots, heads] of the slots in `block` from the recorded signs.
void recompute_g(const IndexGradientPlan& plan, const RowRecord& record, const SlotBlock& block,
                 std::span<const float> weights, std::span<float> g) {
  const FloatTag d;
  for (std::int64_t i = 0; i < block.count; ++i) {
    const std::uint8_t* signs = record.signs + block.slots[i] * plan.sign_bytes;
    const auto d_score = hn::Set(d, block.d_scores[i]);
    for (std::int64_t h = 0; h < plan.heads; h += kLanes, signs += kVectorSignBytes) {
      std::uint8_t bits[8] = {};
      std::memcpy(bits, signs, kVectorSignBytes);
      const auto scaled = hn::Mul(d_score, hn::LoadU(d, weights.data() + h));
      hn::StoreU(hn::IfThenElseZero(hn::LoadMaskBits(d, bits), scaled), d,
                 g.data() + i * plan.head_stride + h);
    }
  }
}

/// The second pass for the query rows [first, first + rows) and one range of keys.
void key_gradient(const IndexTopkBackward& args, const IndexGradientPlan& plan, std::int64_t first,
                  std::int64_t rows, std::byte* records, std::int64_t range, Scratch scratch) {
  const std::int64_t begin = range << plan.range_shift;
  const std::int64_t count =
      std::min(std::int64_t{1} << plan.range_shift, args.d_k.shape[0] - begin);
  const auto q = scratch.take<float>(plan.heads * plan.row_stride);  // [heads, dim]
  const auto weights = scratch.take<float>(plan.head_stride);
  const auto g = scratch.take<float>(kSlotBlock * plan.head_stride);
  // The epilogue adds whole vectors, so rows that end within a vector are accumulated in a copy.
  const bool is_copied = plan.dim % kPanelColumns != 0;
  const auto copy = scratch.take<float>(is_copied ? count * plan.row_stride : 0);
  const std::int64_t stride = is_copied ? plan.row_stride : args.d_k.stride[0];
  float* const sums = is_copied ? copy.data() : static_cast<float*>(row_of(args.d_k, begin));
  if (is_copied) widen_rows(args.d_k, begin, count, sums, stride);

  SlotBlock block;
  for (std::int64_t i = 0; i < rows; ++i) {
    const std::int64_t t = first + i;
    const RowRecord record(plan, records + static_cast<std::size_t>(i) * plan.record_bytes);
    std::int64_t next = record.offsets[range];
    const std::int64_t end = record.offsets[range + 1];
    if (next == end) continue;
    const RowSlots slots(args, t);
    load_weights(args, t, weights);
    widen_rows(slice(args.q, t), 0, plan.heads, q.data(), plan.row_stride);
    while (next < end) {
      block.count = 0;
      for (; next < end && block.count < kSlotBlock; ++next) {
        slots.append(record.slots[next], block);
        block.keys[block.count - 1] -= static_cast<std::int32_t>(begin);
      }
      recompute_g(plan, record, block, weights, g);
      if (*record.is_finite) {
        multiply(KMajor{g.data(), plan.head_stride}, block.count, q.data(), plan.row_stride,
                 plan.dim, plan.heads, AddToKeys{sums, stride, block.keys});
        continue;
      }
      for (std::int64_t j = 0; j < block.count; ++j) {
        for (std::int64_t h = 0; h < plan.heads; ++h) {
          if (!was_positive(record.signs + block.slots[j] * plan.sign_bytes, h)) continue;
          add_scaled(sums + block.keys[j] * stride, g[j * plan.head_stride + h],
                     q.data() + h * plan.row_stride, plan.dim);
        }
      }
    }
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

IndexGradientPlan::IndexGradientPlan(const IndexTopkBackward& args, const Execution& execution)
    : heads(args.q.shape[1]),
      dim(args.q.shape[2]),
      topk(args.indices.shape[1]),
      row_stride(padded_stride(dim)),
      head_stride(padded_stride(heads)),
      sign_bytes(HWY_DYNAMIC_DISPATCH(sign_bytes_of)(heads)) {
  // Few ranges, since each converts every query row that has a key in it to fp32; but enough for
  // all threads, and small enough that a range of d_k stays in cache: 1 MiB at dim 128.
  constexpr std::int64_t kMinKeys = 64, kMaxKeys = 2048, kMaxRanges = 256;
  const std::int64_t keys = args.k.shape[0];
  const std::int64_t balanced = ceil_div(keys, 4 * std::int64_t{thread_count(execution)});
  const auto keys_per_range = static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(
      std::max(std::clamp(balanced, kMinKeys, kMaxKeys), ceil_div(keys, kMaxRanges)))));
  range_shift = std::countr_zero(static_cast<std::uint64_t>(keys_per_range));
  ranges = ceil_div(keys, keys_per_range);

  record_bytes = RowRecord::bytes(*this);
  const std::size_t query_bytes =
      Scratch::bytes<float>(dim * head_stride) + 2 * Scratch::bytes<float>(head_stride) +
      Scratch::bytes<float>(kSlotBlock * row_stride) +
      Scratch::bytes<float>(kSlotBlock * head_stride) + Scratch::bytes<float>(heads * row_stride) +
      Scratch::bytes<float>(4 * row_stride) + Scratch::bytes<float>(kColumnPadding);
  const std::int64_t copied_keys = dim % kColumnPadding == 0 ? 0 : keys_per_range;
  const std::size_t key_bytes = Scratch::bytes<float>(heads * row_stride) +
                                Scratch::bytes<float>(head_stride) +
                                Scratch::bytes<float>(kSlotBlock * head_stride) +
                                Scratch::bytes<float>(copied_keys * row_stride);
  lane_bytes = std::max(query_bytes, key_bytes);
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

std::string why_not(const IndexTopkBackward& args, const Execution& execution) {
  if (args.q.dtype == DType::f64) return refusal::no_f64;
  return over_limit(IndexGradientPlan(args, execution).min_bytes, execution);
}

std::size_t workspace_bytes(const IndexTopkBackward& args, const Execution& execution) {
  return KeySums::bytes(args.d_k) + IndexGradientPlan(args, execution).bytes;
}

void run(const IndexTopkBackward& args, const Execution& execution) {
  const KeySums d_k(args.d_k, execution);
  IndexTopkBackward summed = args;
  summed.d_k = d_k.sums;
  index_gradient(summed, IndexGradientPlan(args, execution), d_k.rest);
  d_k.finish();
}

}  // namespace winnow::cpu
#endif
