// SPDX-License-Identifier: Apache-2.0
// Sparse attention backward, in two passes over a chunk of query rows, for one group of heads.
//   query pass  a task is one query row. Its keys are gathered in blocks, as in forward. Products
//               give s and dP = d_out . v, both [keys, heads]; from these come p and dS, which are
//               recorded, and another product accumulates d_q.
//   key pass    a task is a range of keys. It goes through the query rows in order and adds to d_kv
//               the product of the row's records in the range with d_out and q.
// So every row of d_kv has one writer and is summed in the order of query rows: neither the lanes
// nor the ranges nor the chunks change a bit of it. The records of a row are sorted by key, so that
// those of a range are contiguous.
//
// Kernel `simd` multiplies floats. Kernel `avx512_bf16` multiplies pairs of bf16, p and dS
// rounded to bf16, but floats in rows that would suffer from it: denormals count as 0 in products
// of pairs, and rounding may make large terms infinite.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <vector>

#include "backend_operators.h"
#include "core/refusals.h"
#include "core/threads.h"
#include "core/view.h"
#include "cpu/attention.h"
#include "cpu/backward_plan.h"
#include "cpu/bf16_pairs.h"
#include "cpu/log_add_exp.h"
#include "cpu/plan.h"
#include "cpu/simd.h"
#include "cpu/valid_keys.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/sparse_attention_backward.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "cpu/differentiate-inl.h"
#include "cpu/elements-inl.h"
#include "cpu/matmul-inl.h"
#include "cpu/pack-inl.h"
#include "cpu/widen-inl.h"

HWY_BEFORE_NAMESPACE();
namespace winnow::cpu::HWY_NAMESPACE {
namespace {

float dot(const float* a, const float* b, std::int64_t count) {
  const FloatTag d;
  auto sum = hn::Zero(d);
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    sum = hn::MulAdd(hn::LoadU(d, a + i), hn::LoadU(d, b + i), sum);
  }
  float total = hn::GetLane(hn::SumOfLanes(d, sum));
  for (; i < count; ++i) total += a[i] * b[i];
  return total;
}

/// Loads what does not depend on keys: q^T, d_out^T, L, lse, delta, d_lse, and the contribution of
/// the row to d_sink.
template <class Element>
void load_heads(const SparseAttentionBackward& args, std::int64_t t, HeadRange heads,
                const QueryPass<Element>& row, double* sink_terms) {
  const std::int64_t stride = padded_stride(heads.count);
  const std::int64_t v_dim = args.out.shape[2];
  // row.keys serves as scratch here: no keys have been gathered yet.
  transpose_rows(slice(args.q, t), heads.begin, heads.count, row.q, stride, row.keys);
  transpose_rows(slice(args.d_out, t), heads.begin, heads.count, row.d_out, stride, row.keys);
  float* const out = row.out_rows;
  float* const d_out = row.out_rows + v_dim;
  const View<const float, 1> sinks(args.sink);
  const View<const float, 2> lse(args.lse);
  const View<const float, 2> d_lse(args.d_lse);
  for (std::int64_t i = 0; i < head_padding(heads.count); ++i) {
    row.share[i] = row.lse[i] = row.delta[i] = row.d_lse[i] = 0;
    if (i >= heads.count) continue;
    const std::int64_t h = heads.begin + i;
    widen_row(args.out.dtype, row_of(args.out, t, h), out, v_dim);
    widen_row(args.d_out.dtype, row_of(args.d_out, t, h), d_out, v_dim);
    constexpr double kNone = -std::numeric_limits<double>::infinity();
    const double sink = sinks ? sinks(h) : kNone;
    const double log_sum = log_add_exp(lse(t, h), sink);
    row.lse[i] = lse(t, h);
    row.share[i] = sink == kNone ? 1 : static_cast<float>(1 / (1 + std::exp(sink - lse(t, h))));
    row.delta[i] = dot(out, d_out, v_dim);
    if (d_lse) row.d_lse[i] = d_lse(t, h);
    const bool has_gradient = !std::isinf(sink) && !std::isinf(row.lse[i]);
    sink_terms[i] = has_gradient ? -row.delta[i] * std::exp(sink - log_sum) : 0.0;
  }
}

/// Computes d_q and the records of query row t, whose keys have been taken. Returns false, and has
/// written no d_q, if the row is none for pairs.
template <class Element>
bool differentiate_row(const SparseAttentionBackward& args, const Records& records,
                       std::int64_t row_index, std::int64_t t, HeadRange heads, Scratch scratch) {
  constexpr bool kArePairs = QueryPass<Element>::kArePairs;
  constexpr std::int64_t kBlockKeys = QueryPass<Element>::kBlockKeys;
  const AttentionSizes n = attention_sizes(args);
  const QueryPass<Element> row(n, heads.count, scratch);
  const std::int64_t padding = head_padding(records.heads);
  const std::int64_t head_stride = padded_stride(heads.count);
  const std::int64_t key_stride = padded_stride(row.depth);
  const std::int64_t d_q_stride = padded_stride(n.qk_dim);
  const std::int64_t product_stride = Records::stride<float>(records.heads);
  const std::int32_t* const keys = records.keys_of(row_index);
  const std::int64_t count = records.counts[row_index];

  load_heads(args, t, heads, row, records.sink_terms + row_index * records.heads);
  [[maybe_unused]] float least_factor = 1;  // of q and d_out
  [[maybe_unused]] float largest_key = 0;
  if constexpr (kArePairs) {
    const std::int64_t columns = padded_columns(heads.count);
    least_factor =
        std::min(least_magnitude(row.q, head_stride, row.depth, columns),
                 least_magnitude(row.d_out, head_stride, elements_of<Element>(n.v_dim), columns));
    if (!have_normal_products(least_factor, 1)) return false;
    for (float* const largest : {row.largest_p, row.largest_dS, row.largest_d_q_term})
      std::fill_n(largest, padding, 0.0f);
  }
  for (std::int64_t j = 0; j < count; j += kBlockKeys) {
    const std::int64_t block = std::min(count - j, kBlockKeys);
    Element* const record = records.record<Element>(row_index, j);
    const KMajor<Element> block_keys{row.keys, key_stride};
    gather_rows(args.kv, keys + j, block, row.keys, key_stride);
    float* products = row.products;
    const Element* values = row.keys;
    std::int64_t value_stride = key_stride;
    if constexpr (kArePairs) {
      const float least_key = least_magnitude(row.keys, key_stride, block, row.depth);
      if (!have_normal_products(least_factor, least_key)) return false;
      for (std::int64_t i = 0; i < block; ++i) {
        row.key_magnitudes[i] =
            largest_magnitude(row.keys + i * key_stride, key_stride, 1, row.depth);
        largest_key = std::max(largest_key, row.key_magnitudes[i]);
      }
      values = row.key_pairs;
      value_stride = d_q_stride;
      interleave_packed(row.keys, key_stride, block, n.qk_dim, row.key_pairs, value_stride);
    } else {
      products = record;
    }
    multiply_blocked(block_keys, block, row.q, head_stride, padding, row.depth, products,
                     product_stride);
    multiply_blocked(block_keys, block, row.d_out, head_stride, padding,
                     elements_of<Element>(n.v_dim), products + padding, product_stride);
    const MnMajor<Element> dS =
        differentiate(row, record, records.heads, block, args.scale, bool(args.d_lse));
    multiply_blocked(dS, heads.count, values, value_stride, n.qk_dim, elements_of<Element>(block),
                     row.d_q, d_q_stride, j > 0);
  }
  if constexpr (kArePairs) {
    if (!bf16_suffices(row, n, heads.count, largest_key)) return false;
  }
  for (std::int64_t i = 0; i < heads.count; ++i) {
    narrow_row(args.d_q.dtype, row.d_q + i * d_q_stride, 1, row_of(args.d_q, t, heads.begin + i),
               n.qk_dim);
  }
  return true;
}

/// The first pass for query row t, whose records get the index `row_index`.
void query_pass(const SparseAttentionBackward& args, bool with_pairs, const Records& records,
                std::int64_t row_index, std::int64_t t, HeadRange heads, Scratch scratch) {
  const AttentionSizes n = attention_sizes(args);
  std::int32_t* const keys = records.keys_of(row_index);
  const std::int64_t count = ValidKeys(args.indices, args.lengths, n.keys, t).take(n.topk, keys);
  records.counts[row_index] = count;
  records.are_pairs[row_index] = false;
  if (count == 0) {
    std::fill_n(records.sink_terms + row_index * records.heads, heads.count, 0.0);
    for (std::int64_t i = 0; i < heads.count; ++i) {
      std::memset(row_of(args.d_q, t, heads.begin + i), 0,
                  static_cast<std::size_t>(n.qk_dim * element_bytes(args.d_q.dtype)));
    }
    return;
  }
  if (!std::is_sorted(keys, keys + count)) std::sort(keys, keys + count);
  if constexpr (kMultipliesPairs) {
    records.are_pairs[row_index] =
        with_pairs && differentiate_row<Bf16Pair>(args, records, row_index, t, heads, scratch);
  }
  if (!records.are_pairs[row_index])
    differentiate_row<float>(args, records, row_index, t, heads, scratch);
}

/// Epilogue: adds the rows of a product to the rows of d_kv that `keys` gives, one after another,
/// since a key may appear twice in a tile.
struct AddToKeys {
  const std::int32_t* keys;
  std::int64_t count;  // number of keys
  float* d_kv;
  std::int64_t stride;
  std::int64_t columns;

  AddToKeys at(std::int64_t row, std::int64_t column) const {
    const AddToKeys tile{keys + row, count - row, d_kv + column, stride, columns - column};
    // Prefetch the rows of d_kv, so that they arrive while the tile is computed.
    const std::int64_t rows = std::min<std::int64_t>(tile.count, kTileRows);
    for (std::int64_t i = 0; i < rows; ++i) {
      const float* const to = tile.d_kv + tile.keys[i] * stride;
      hwy::Prefetch(to);
      hwy::Prefetch(to + 16);
    }
    return tile;
  }
  AddToKeys from_column(std::int64_t column) const {
    return {keys, count, d_kv + column, stride, columns - column};
  }
  HWY_INLINE void operator()(int row, int v, FloatVector sum) const {
    const FloatTag d;
    float* const to = d_kv + keys[row] * stride + v * kLanes;
    const std::int64_t left = columns - v * kLanes;
    if (left >= kLanes) {
      hn::StoreU(hn::Add(hn::LoadU(d, to), sum), d, to);
    } else {
      HWY_ALIGN float lanes[kLanes];
      hn::Store(sum, d, lanes);
      for (std::int64_t i = 0; i < left; ++i) to[i] += lanes[i];
    }
  }
};

/// Adds the records [first, last) of a row to d_kv.
template <class Element>
void add_records(const SparseAttentionBackward& args, const Records& records, std::int64_t row,
                 std::int64_t t, HeadRange heads, std::int64_t first, std::int64_t last,
                 const KeyPass<Element>& pass, const Tensor& d_kv) {
  const AttentionSizes n = attention_sizes(args);
  // Columns below `split` get contributions from d_out, padded with zeros after v_dim.
  const std::int64_t split = std::min(padded_columns(n.v_dim), n.qk_dim);
  // Number of records that stay in L2 while the product goes through the columns of d_kv.
  constexpr std::int64_t kBlockRecords = 240;

  load_depth(slice(args.d_out, t), heads.begin, heads.count, pass.d_out(), pass.stride);
  load_depth(slice(args.q, t), heads.begin, heads.count, pass.q(), pass.stride);
  for (std::int64_t j = first; j < last; j += kBlockRecords) {
    const std::int64_t count = std::min(last - j, kBlockRecords);
    const AddToKeys add{records.keys_of(row) + j, count, static_cast<float*>(d_kv.data),
                        d_kv.stride[0], n.qk_dim};
    const KMajor<Element> p_and_dS{records.record<Element>(row, j),
                                   Records::stride<Element>(records.heads)};
    multiply(p_and_dS, count, pass.d_out(), pass.stride, split, 2 * pass.rows, add);
    if (split < n.qk_dim) {
      multiply(p_and_dS.from(0, pass.rows), count, pass.q() + split, pass.stride, n.qk_dim - split,
               pass.rows, add.from_column(split));
    }
  }
}

/// The second pass for the keys in [begin, end), over the `rows` recorded rows from first_row on.
void key_pass(const SparseAttentionBackward& args, bool with_pairs, const Records& records,
              std::int64_t rows, std::int64_t first_row, HeadRange heads, std::int32_t begin,
              std::int32_t end, const Tensor& d_kv, Scratch scratch) {
  const AttentionSizes n = attention_sizes(args);
  const KeyPass<float> floats(n, records.heads, scratch);
  std::optional<KeyPass<Bf16Pair>> pairs;
  if (with_pairs) pairs.emplace(n, records.heads, scratch);
  for (std::int64_t row = 0; row < rows; ++row) {
    const std::int32_t* const keys = records.keys_of(row);
    const std::int32_t* const keys_end = keys + records.counts[row];
    const std::int64_t first = std::lower_bound(keys, keys_end, begin) - keys;
    const std::int64_t last = std::lower_bound(keys + first, keys_end, end) - keys;
    if (first == last) continue;
    const auto add = [&](const auto& pass) {
      add_records(args, records, row, first_row + row, heads, first, last, pass, d_kv);
    };
    if constexpr (kMultipliesPairs) {
      if (records.are_pairs[row]) {
        add(*pairs);
        continue;
      }
    }
    add(floats);
  }
}

void round_rows(const Tensor& from, const Tensor& to, std::int64_t begin, std::int64_t end) {
  for (std::int64_t i = begin; i < end; ++i) {
    narrow_row(to.dtype, static_cast<const float*>(row_of(from, i)), 1, row_of(to, i), to.shape[1]);
  }
}

}  // namespace
}  // namespace winnow::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace winnow::cpu {
namespace {

HWY_EXPORT(query_pass);
HWY_EXPORT(key_pass);
HWY_EXPORT(round_rows);

constexpr std::int64_t kKeysPerTask = 256;

/// Splits the keys into ranges with about equal numbers of records. Range i is
/// [boundaries[i], boundaries[i + 1]).
std::vector<std::int32_t> key_ranges(const Records& records, std::int64_t rows, std::int64_t keys,
                                     const Execution& execution) {
  constexpr std::int64_t kBuckets = 4096;
  constexpr std::int64_t kRangesPerThread = 4;
  // Average records of a row per range, to amortise the loading of its q and d_out.
  constexpr std::int64_t kMinRecords = 96;
  const std::int64_t bucket_keys = ceil_div(keys, kBuckets);
  std::array<std::int64_t, kBuckets> counts{};
  std::int64_t total = 0;
  for (std::int64_t row = 0; row < rows; ++row) {
    const std::int32_t* const row_keys = records.keys_of(row);
    for (std::int64_t j = 0; j < records.counts[row]; ++j) ++counts[row_keys[j] / bucket_keys];
    total += records.counts[row];
  }
  const std::int64_t threads = thread_count(execution);
  const std::int64_t ranges =
      std::clamp(total / (rows * kMinRecords), threads, kRangesPerThread * threads);
  std::vector<std::int32_t> boundaries = {0};
  std::int64_t records_so_far = 0;
  for (std::int64_t bucket = 0; bucket < kBuckets; ++bucket) {
    records_so_far += counts[bucket];
    const auto count = static_cast<std::int64_t>(boundaries.size());
    if (count < ranges && records_so_far * ranges >= total * count) {
      boundaries.push_back(static_cast<std::int32_t>(std::min((bucket + 1) * bucket_keys, keys)));
    }
  }
  boundaries.push_back(static_cast<std::int32_t>(keys));
  return boundaries;
}

bool is_added_to(const SparseAttentionBackward& args) { return args.d_kv.dtype == DType::f32; }

/// Bytes of the fp32 accumulator of a bf16 or f16 d_kv, which is rounded once at the end.
std::size_t accumulator_bytes(const SparseAttentionBackward& args) {
  return is_added_to(args) ? 0 : Scratch::bytes<float>(args.kv.shape[0] * args.kv.shape[1]);
}

void run_passes(const SparseAttentionBackward& args, bool with_pairs, const Execution& execution) {
  const AttentionSizes n = attention_sizes(args);
  const BackwardPlan plan(n, may_have_pairs(args), execution);
  const HeadGroups& groups = plan.groups();

  const std::size_t shared_bytes = accumulator_bytes(args) + plan.shared_bytes();
  Scratch shared(static_cast<std::byte*>(execution.workspace), shared_bytes);
  const Tensor d_kv = is_added_to(args) ? args.d_kv
                                        : tensor(shared.take<float>(n.keys * n.qk_dim).data(),
                                                 DType::f32, {n.keys, n.qk_dim});
  const std::span<double> d_sink = shared.take<double>(n.heads);
  Execution lanes = execution;
  lanes.workspace = static_cast<std::byte*>(execution.workspace) + shared_bytes;
  lanes.workspace_bytes = plan.lanes() * plan.lane_bytes();

  std::fill(d_sink.begin(), d_sink.end(), 0.0);
  const auto for_blocks_of_keys = [&](const auto& task) {
    parallel_for(lanes, ceil_div(n.keys, kKeysPerTask), 0, [&](std::int64_t i, Scratch) {
      task(i * kKeysPerTask, std::min((i + 1) * kKeysPerTask, n.keys));
    });
  };
  if (!is_added_to(args)) {
    for_blocks_of_keys([&](std::int64_t begin, std::int64_t end) {
      auto* const sums = static_cast<float*>(d_kv.data);
      std::fill(sums + begin * n.qk_dim, sums + end * n.qk_dim, 0.0f);
    });
  }
  const auto query_pass_on_target = HWY_DYNAMIC_DISPATCH(query_pass);
  const auto key_pass_on_target = HWY_DYNAMIC_DISPATCH(key_pass);
  for (std::int64_t group = 0; group < groups.count(); ++group) {
    const HeadRange heads = groups[group];
    Scratch memory = shared;  // a copy, so that every group uses the same memory
    const Records records(plan.rows(), n.topk, heads.count, memory);
    for (std::int64_t t = 0; t < n.tokens; t += plan.rows()) {
      const std::int64_t rows = std::min(plan.rows(), n.tokens - t);
      parallel_for(lanes, rows, plan.lane_bytes(), [&](std::int64_t row, Scratch scratch) {
        query_pass_on_target(args, with_pairs, records, row, t + row, heads, scratch);
      });
      const std::vector<std::int32_t> ranges = key_ranges(records, rows, n.keys, execution);
      parallel_for(lanes, static_cast<std::int64_t>(ranges.size()) - 1, plan.lane_bytes(),
                   [&](std::int64_t i, Scratch scratch) {
                     key_pass_on_target(args, with_pairs, records, rows, t, heads, ranges[i],
                                        ranges[i + 1], d_kv, scratch);
                   });
      for (std::int64_t row = 0; row < rows; ++row) {
        for (std::int64_t i = 0; i < heads.count; ++i) {
          d_sink[heads.begin + i] += records.sink_terms[row * records.heads + i];
        }
      }
    }
  }

  if (!is_added_to(args)) {
    const auto round_on_target = HWY_DYNAMIC_DISPATCH(round_rows);
    for_blocks_of_keys([&](std::int64_t begin, std::int64_t end) {
      round_on_target(d_kv, args.d_kv, begin, end);
    });
  }
  if (args.d_sink) {
    const View<float, 1> sum(args.d_sink);
    for (std::int64_t h = 0; h < n.heads; ++h) sum(h) = static_cast<float>(sum(h) + d_sink[h]);
  }
}

}  // namespace

std::string why_not(const SparseAttentionBackward& args, const Execution& execution) {
  if (args.q.dtype == DType::f64) return refusal::no_f64;
  return over_limit(BackwardPlan::min_bytes(attention_sizes(args), may_have_pairs(args)),
                    execution);
}
std::string why_not_pairs(const SparseAttentionBackward& args) {
  return why_not_pairs_of(args.q.dtype);
}
std::size_t workspace_bytes(const SparseAttentionBackward& args, const Execution& execution) {
  return accumulator_bytes(args) +
         BackwardPlan(attention_sizes(args), may_have_pairs(args), execution).bytes();
}
void run(const SparseAttentionBackward& args, const Execution& execution) {
  run_passes(args, false, execution);
}
void run_pairs(const SparseAttentionBackward& args, const Execution& execution) {
  run_passes(args, true, execution);
}

}  // namespace winnow::cpu
#endif
