// SPDX-License-Identifier: Apache-2.0
// The first pass of the indexer's backward: d_q and d_weights of a query row, and what the second
// pass needs to know of it. Included once per SIMD target.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <span>

#include <hwy/highway.h>

#include "core/numerics.h"
#include "core/threads.h"
#include "cpu/elements-inl.h"
#include "cpu/index_gradient.h"
#include "cpu/index_gradient_scratch.h"
#include "cpu/index_scores-inl.h"
#include "cpu/index_slots.h"
#include "cpu/matmul-inl.h"
#include "cpu/pack-inl.h"
#include "cpu/simd.h"
#include "cpu/widen-inl.h"
#include "winnow/index_topk.h"

#if defined(WINNOW_CPU_INDEX_QUERY_GRADIENT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef WINNOW_CPU_INDEX_QUERY_GRADIENT_INL_H_
#undef WINNOW_CPU_INDEX_QUERY_GRADIENT_INL_H_
#else
#define WINNOW_CPU_INDEX_QUERY_GRADIENT_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace winnow::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

/// Bytes that hold one bit per lane of a vector.
inline constexpr std::int64_t kVectorSignBytes = (kLanes + 7) / 8;

inline bool is_finite(std::span<const float> values) {
  return std::isfinite(largest_magnitude(values));
}

/// The mask of lanes whose signs were recorded as positive.
template <class D>
HWY_INLINE hn::Mask<D> load_signs(D d, const std::uint8_t* signs) {
  std::uint8_t bits[8] = {};
  std::memcpy(bits, signs, kVectorSignBytes);
  return hn::LoadMaskBits(d, bits);
}

/// Epilogue of a [slots, heads]: records the signs and adds to d_weights. Returns the signs.
struct RecordProducts {
  const SlotBlock* block;
  float* d_weights;
  std::uint8_t* signs;
  std::int64_t sign_bytes;
  std::int64_t first_slot;

  RecordProducts at(std::int64_t row, std::int64_t column) const {
    return {block, d_weights + column, signs + column / kLanes * kVectorSignBytes, sign_bytes,
            first_slot + row};
  }
  HWY_INLINE hn::Mask<FloatTag> operator()(int row, int v, FloatVector a) const {
    const FloatTag d;
    const auto is_positive = hn::Gt(a, hn::Zero(d));
    float* const d_weight = d_weights + v * kLanes;
    hn::StoreU(hn::MulAdd(d_score(row), relu(a), hn::LoadU(d, d_weight)), d, d_weight);
    std::uint8_t bits[8];
    hn::StoreMaskBits(d, is_positive, bits);
    std::memcpy(signs + block->slots[first_slot + row] * sign_bytes + v * kVectorSignBytes, bits,
                kVectorSignBytes);
    return is_positive;
  }
  HWY_INLINE FloatVector d_score(int row) const {
    return hn::Set(FloatTag(), block->d_scores[first_slot + row]);
  }
};

/// The same of floats, which also writes g. `nan_probe` becomes NaN if a key is not finite, since
/// then a is not finite for any head.
struct GradientEpilogue {
  RecordProducts record;
  const float* weights;
  float* g;
  std::int64_t head_stride;
  float* nan_probe;

  GradientEpilogue at(std::int64_t row, std::int64_t column) const {
    return {record.at(row, column), weights + column, g + row * head_stride + column, head_stride,
            nan_probe};
  }
  HWY_INLINE void operator()(int row, int v, FloatVector a) const {
    const FloatTag d;
    const auto is_positive = record(row, v, a);
    const auto scaled = hn::Mul(record.d_score(row), hn::LoadU(d, weights + v * kLanes));
    hn::StoreU(hn::IfThenElseZero(is_positive, scaled), d, g + row * head_stride + v * kLanes);
    if (v == 0) hn::StoreU(hn::MulAdd(a, hn::Zero(d), hn::LoadU(d, nan_probe)), d, nan_probe);
  }
};

/// Whether a > 0 was recorded for head h.
inline bool was_positive(const std::uint8_t* signs, std::int64_t h) {
  return (signs[h / kLanes * kVectorSignBytes + h % kLanes / 8] >> (h % kLanes % 8) & 1) != 0;
}

/// target[d] += factor * source[d]. Used where `source` has NaN or infinities: there a matrix
/// product would turn a g of 0 into NaN.
inline void add_scaled(float* target, float factor, const float* source, std::int64_t dim) {
  for (std::int64_t d = 0; d < dim; ++d) target[d] += factor * source[d];
}

/// Loads weights[t], padded with zeros to whole vectors.
inline void load_weights(const IndexTopkBackward& args, std::int64_t t, std::span<float> weights) {
  std::fill(weights.begin(), weights.end(), 0.0f);
  widen_row(DType::f32, row_of(args.weights, t), weights.data(), args.weights.shape[1]);
}
/// The same, rounded to bf16.
inline void load_weights(const IndexTopkBackward& args, std::int64_t t,
                         std::span<Bf16Pair> weights) {
  std::fill(weights.begin(), weights.end(), Bf16Pair{});
  narrow_row(static_cast<const float*>(row_of(args.weights, t)), 1.0f,
             reinterpret_cast<BFloat16*>(weights.data()), args.weights.shape[1]);
}

/// Loads what does not depend on keys.
template <class Element>
void load_query(const IndexTopkBackward& args, const IndexGradientPlan& plan, std::int64_t t,
                const QueryGradientScratch<Element>& row) {
  // row.keys serves as scratch here: no keys have been gathered yet.
  transpose_rows(slice(args.q, t), 0, plan.heads, row.q, plan.head_stride, row.keys);
  load_weights(args, t, row.weights);
  std::fill(row.d_weights.begin(), row.d_weights.end(), 0.0f);
  std::fill(row.d_q.begin(), row.d_q.end(), 0.0f);
}

/// Stores d_weights, and d_q of head h times factor_of(h).
template <class Element, class FactorOf>
void store_gradients(const IndexTopkBackward& args, const IndexGradientPlan& plan, std::int64_t t,
                     const QueryGradientScratch<Element>& row, const FactorOf& factor_of) {
  for (std::int64_t h = 0; h < plan.heads; ++h) {
    narrow_row(args.d_q.dtype, row.d_q.data() + h * plan.row_stride, factor_of(h),
               row_of(args.d_q, t, h), plan.dim);
  }
  std::copy_n(row.d_weights.data(), plan.heads, static_cast<float*>(row_of(args.d_weights, t)));
}

/// The first pass for query row t, whose slots have been sorted, in floats.
inline void query_gradient_of_floats(const IndexTopkBackward& args, const IndexGradientPlan& plan,
                                     std::int64_t t, RowSlots slots, const RowRecord& record,
                                     Scratch scratch) {
  const QueryGradientScratch<float> row(plan, scratch);
  float* const g = row.factors;
  load_query(args, plan, t, row);
  *record.is_finite = true;
  for (std::int64_t d = 0; d < plan.dim; ++d)
    *record.is_finite &=
        is_finite({row.q + d * plan.head_stride, static_cast<std::size_t>(plan.heads)});

  SlotBlock block;
  for (slots.next_block(block); block.count > 0; slots.next_block(block)) {
    gather_rows(args.k, block.keys, block.count, row.keys, row.key_stride);
    float nan_probe[kLanes] = {};
    const KMajor<float> key_rows{row.keys, row.key_stride};
    const GradientEpilogue epilogue{
        {&block, row.d_weights.data(), record.signs, plan.sign_bytes, 0},
        row.weights.data(),
        g,
        plan.head_stride,
        nan_probe};
    if (plan.dim <= kMaxUnblockedDim) {
      multiply(key_rows, block.count, row.q, plan.head_stride, plan.heads, plan.dim, epilogue);
    } else {
      multiply_blocked(key_rows, block.count, row.q, plan.head_stride, plan.heads, plan.dim, g,
                       plan.head_stride, false, kBlockDim);
      for (std::int64_t h = 0; h < plan.heads; h += kLanes) {
        for (std::int64_t i = 0; i < block.count; ++i) {
          const auto a = hn::LoadU(FloatTag(), g + i * plan.head_stride + h);
          epilogue.at(i, h)(0, 0, a);
        }
      }
    }
    if (is_finite(nan_probe)) {
      multiply(MnMajor<float>{g, plan.head_stride}, plan.heads, row.keys, row.key_stride, plan.dim,
               block.count, AddTo{row.d_q.data(), plan.row_stride});
      continue;
    }
    for (std::int64_t i = 0; i < block.count; ++i) {
      for (std::int64_t h = 0; h < plan.heads; ++h) {
        if (!was_positive(record.signs + block.slots[i] * plan.sign_bytes, h)) continue;
        add_scaled(row.d_q.data() + h * plan.row_stride, g[i * plan.head_stride + h],
                   row.keys + i * row.key_stride, plan.dim);
      }
    }
  }
  store_gradients(args, plan, t, row, [](std::int64_t) { return 1.0f; });
}

/// Makes the factors of the keys in d_q, [slots / 2, heads]: the d_scores of two neighbouring
/// slots, rounded to bf16, where a > 0 was recorded.
inline void select_d_scores(const IndexGradientPlan& plan, const RowRecord& record,
                            const SlotBlock& block, Bf16Pair* factors) {
  const PairTag d;
  for (std::int64_t i = 0; i < block.count; i += 2) {
    // Of an odd number of keys the last one stands beside zeros.
    const std::int64_t next = std::min(i + 1, block.count - 1);
    const auto bits_of = [&](std::int64_t slot) {
      return std::uint32_t{to_bfloat16(block.d_scores[slot]).bits};
    };
    const auto first = hn::Set(d, bits_of(i));
    const auto second = hn::Set(d, bits_of(next) << 16);
    const std::uint8_t* signs = record.signs + block.slots[i] * plan.sign_bytes;
    const std::uint8_t* next_signs = record.signs + block.slots[next] * plan.sign_bytes;
    Bf16Pair* const to = factors + i / 2 * plan.head_stride;
    for (std::int64_t h = 0; h < plan.heads; h += kLanes) {
      const auto pair = hn::Or(hn::IfThenElseZero(load_signs(d, signs), first),
                               hn::IfThenElseZero(load_signs(d, next_signs), second));
      hn::StoreU(pair, d, &to[h].bits);
      signs += kVectorSignBytes;
      next_signs += kVectorSignBytes;
    }
  }
}

/// Whether factors, of which these are the largest, are finite when they are rounded to bf16, and
/// so are sums of up to 2^37 of their products. NaN exceeds infinity.
inline bool have_finite_sums(float largest, float largest_of_other) {
  return std::max(largest, 1.0f) * std::max(largest_of_other, 1.0f) <= 0x1p90f;
}

/// The first pass for query row t in pairs. Returns false, and has written no gradient, if the row
/// is none for pairs.
inline bool query_gradient_of_pairs(const IndexTopkBackward& args, const IndexGradientPlan& plan,
                                    std::int64_t t, RowSlots slots, const RowRecord& record,
                                    Scratch scratch) {
  const QueryGradientScratch<Bf16Pair> row(plan, scratch);
  load_query(args, plan, t, row);
  const std::int64_t columns = padded_columns(plan.heads);
  const float least_q = least_magnitude(row.q, plan.head_stride, row.depth, columns);
  const float largest_q = largest_magnitude(row.q, plan.head_stride, row.depth, columns);
  if (!have_normal_products(least_q, least_magnitude(row.weights)) ||
      !have_finite_sums(largest_q, largest_magnitude(row.weights)))
    return false;

  SlotBlock block;
  for (slots.next_block(block); block.count > 0; slots.next_block(block)) {
    gather_rows(args.k, block.keys, block.count, row.keys, row.key_stride);
    const float least_key = least_magnitude(row.keys, row.key_stride, block.count, row.depth);
    const float largest_key = largest_magnitude(row.keys, row.key_stride, block.count, row.depth);
    const std::span<const float> d_scores(block.d_scores, static_cast<std::size_t>(block.count));
    if (!have_normal_products(least_key, std::min(least_q, least_magnitude(d_scores))) ||
        !have_finite_sums(largest_key, largest_q) ||
        !have_finite_sums(largest_key, largest_magnitude(d_scores)))
      return false;
    multiply(KMajor<Bf16Pair>{row.keys, row.key_stride}, block.count, row.q, plan.head_stride,
             plan.heads, row.depth,
             RecordProducts{&block, row.d_weights.data(), record.signs, plan.sign_bytes, 0});
    interleave_packed(row.keys, row.key_stride, block.count, plan.dim, row.keys_along_slots,
                      plan.row_stride);
    select_d_scores(plan, record, block, row.factors);
    multiply(MnMajor<Bf16Pair>{row.factors, plan.head_stride}, plan.heads, row.keys_along_slots,
             plan.row_stride, plan.dim, elements_of<Bf16Pair>(block.count),
             AddTo{row.d_q.data(), plan.row_stride});
  }
  store_gradients(args, plan, t, row, [&](std::int64_t h) { return row.weights[h]; });
  return true;
}

/// The first pass for query row t.
inline void query_gradient(const IndexTopkBackward& args, const IndexGradientPlan& plan,
                           std::int64_t t, const RowRecord& record, Scratch scratch) {
  const RowSlots slots(args, t);
  sort_slots_by_range(slots, plan, record);
  *record.are_pairs = false;
  if constexpr (kMultipliesPairs) {
    *record.are_pairs =
        plan.with_pairs && query_gradient_of_pairs(args, plan, t, slots, record, scratch);
  }
  if (!*record.are_pairs) query_gradient_of_floats(args, plan, t, slots, record, scratch);
}

}  // namespace winnow::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
