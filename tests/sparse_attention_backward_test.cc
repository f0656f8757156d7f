// SPDX-License-Identifier: Apache-2.0
// sparse_attention backward: properties of the gradients. gradients_test compares them with finite
// differences.
#include "tests/attention_calls.h"

namespace winnow::tests {
namespace {

void clear_row(Attention& a, std::int64_t t) {
  for (std::int64_t j = 0; j < a.topk; ++j) a.indices[t * a.topk + j] = j % 2 == 0 ? -1 : kMaxInt32;
}

bool all_within(const Values& values, double limit) {
  return std::all_of(values.begin(), values.end(),
                     [&](double value) { return std::fabs(value) <= limit; });
}

/// a * x + b * y
Values combined(double a, const Values& x, double b, const Values& y) {
  Values result(x.size());
  for (std::size_t i = 0; i < x.size(); ++i) result[i] = a * x[i] + b * y[i];
  return result;
}

TEST(SparseAttentionBackward, IsLinearInDOutAndDLse) {
  on_each_kernel("sparse_attention", [](const Execution& execution) {
    const Attention x = with_sink(filled({.dtype = DType::f32}, 31), 31);
    Attention y = x;
    y.d_out = normals(static_cast<std::int64_t>(x.d_out.size()), 32, "d_out");
    y.d_lse = normals(static_cast<std::int64_t>(x.d_lse.size()), 32, "d_lse");
    Attention sum = x;
    sum.d_out = combined(2, as_stored(x.dtype, x.d_out), -0.5, as_stored(x.dtype, y.d_out));
    sum.d_lse = combined(2, as_stored(x.dtype, x.d_lse), -0.5, as_stored(x.dtype, y.d_lse));
    const AttentionOutputs outputs = forward(x, execution);
    const AttentionGradients of_x = backward(x, outputs, execution);
    const AttentionGradients of_y = backward(y, outputs, execution);
    expect_close(x, backward(sum, outputs, execution),
                 {combined(2, of_x.d_q, -0.5, of_y.d_q), combined(2, of_x.d_kv, -0.5, of_y.d_kv),
                  combined(2, of_x.d_sink, -0.5, of_y.d_sink)});
  });
}

TEST(SparseAttentionBackward, RowsWithoutKeysTouchNothing) {
  on_each_attention_kernel(33, [](const Execution& execution, const Attention& whole) {
    Attention a = whole;
    // Every other row has keys, of many only some 40: each of them is called alone.
    const std::int64_t step = std::max<std::int64_t>(2, a.tokens / 40);
    std::vector<std::int64_t> without_keys;
    for (std::int64_t t = 0; t < a.tokens; ++t) {
      if (t % step == 1) continue;
      clear_row(a, t);
      without_keys.push_back(t);
    }
    const AttentionOutputs outputs = forward(a, execution);
    const AttentionGradients expected = backward(a, outputs, deterministic(execution));

    Attention spoilt = a;
    const std::int64_t out_row = a.heads * a.v_dim;
    for (const std::int64_t t : without_keys) {
      std::fill_n(spoilt.d_out.begin() + t * out_row, out_row, kNaN);
      std::fill_n(spoilt.d_lse.begin() + t * a.heads, a.heads, t == 0 ? kNaN : kInfinity);
    }
    const AttentionGradients gradients = backward(spoilt, outputs, deterministic(execution));
    expect_same_bits(gradients, expected);
    const std::int64_t q_row = a.heads * a.qk_dim;
    for (const std::int64_t t : without_keys)
      EXPECT_TRUE(all_zero(part(gradients.d_q, t * q_row, q_row)));

    // Only rows with keys contribute.
    AttentionGradients sum = {Values(static_cast<std::size_t>(a.tokens * q_row)),
                              Values(gradients.d_kv.size()), Values(gradients.d_sink.size())};
    for (std::int64_t t = 1; t < a.tokens; t += step) {
      const AttentionGradients alone =
          backward(rows_of(a, t, 1), rows_of(a, outputs, t, 1), execution);
      std::copy(alone.d_q.begin(), alone.d_q.end(), sum.d_q.begin() + t * q_row);
      sum.d_kv = combined(1, sum.d_kv, 1, alone.d_kv);
      sum.d_sink = combined(1, sum.d_sink, 1, alone.d_sink);
    }
    expect_close(a, gradients, sum);
  });
}

TEST(SparseAttentionBackward, NoKeysInAnyRowGiveZeros) {
  on_each_kernel("sparse_attention", [](const Execution& execution) {
    Attention a = with_sink(filled({}, 34), 34);
    for (std::int64_t t = 0; t < a.tokens; ++t) clear_row(a, t);
    a.d_out.assign(a.d_out.size(), kNaN);
    const AttentionGradients gradients = forward_backward(a, execution);
    EXPECT_TRUE(all_zero(gradients.d_q));
    EXPECT_TRUE(all_zero(gradients.d_kv));
    EXPECT_TRUE(all_zero(gradients.d_sink));
  });
}

TEST(SparseAttentionBackward, WhatNoSlotNamesIsNeitherReadNorWritten) {
  on_each_attention_kernel(35, [](const Execution& execution, const Attention& whole) {
    Attention a = whole;
    for (std::int32_t& index : a.indices)
      if (index % 4 == 0) index = index % 8 == 0 ? -1 : static_cast<std::int32_t>(a.keys);
    a.d_kv_before = normals(static_cast<std::int64_t>(a.kv.size()), 35, "d_kv");
    const AttentionOutputs outputs = forward(a, execution);
    const AttentionGradients expected = backward(a, outputs, deterministic(execution));
    Attention spoilt = a;
    for (std::int64_t s = 0; s < a.keys; s += 4)
      std::fill_n(spoilt.kv.begin() + s * a.qk_dim, a.qk_dim, kNaN);
    const AttentionGradients gradients = backward(spoilt, outputs, deterministic(execution));
    expect_same_bits(gradients, expected);
    const Values before = as_stored(DType::f32, a.d_kv_before);
    for (std::int64_t s = 0; s < a.keys; s += 4)
      EXPECT_TRUE(same_bits(part(gradients.d_kv, s * a.qk_dim, a.qk_dim),
                            part(before, s * a.qk_dim, a.qk_dim)));
  });
}

TEST(SparseAttentionBackward, SlotsPastLengthsHoldNone) {
  on_each_attention_kernel(36, [](const Execution& execution, const Attention& whole) {
    Attention a = whole;
    Attention cut = whole;
    for (std::int64_t t = 0; t < a.tokens; ++t) {
      a.lengths.push_back(static_cast<std::int32_t>(t * a.topk / (a.tokens - 1)));
      for (std::int64_t j = a.lengths[t]; j < a.topk; ++j) cut.indices[t * a.topk + j] = -1;
    }
    expect_close(a, forward_backward(a, execution), forward_backward(cut, execution));
  });
}

// Where a row has one key, p is 1 and d_out.v - delta is 0 but for rounding: the gradients are far
// smaller than their terms, by which their errors are measured.
TEST(SparseAttentionBackward, GradientsWhoseTermsCancelAreAsPreciseAsTheTerms) {
  on_each_attention_kernel(46, [](const Execution& execution, const Attention& whole) {
    for (const std::int64_t keys : {1, 2}) {
      SCOPED_TRACE(keys);
      Attention a = whole;
      a.lengths.assign(static_cast<std::size_t>(a.tokens), static_cast<std::int32_t>(keys));
      a.d_lse.clear();
      const AttentionGradients expected = gradients_in_double(a);
      expect_within_magnitudes(a, forward_backward(a, execution), expected);
      if (keys == 1 && a.sink.empty()) {
        EXPECT_TRUE(all_within(expected.d_q, 1e-12));
      }
    }
  });
}

TEST(SparseAttentionBackward, KeysMayStandInManySlotsOfManyRows) {
  // One key in all slots of all rows; then a few keys, each several times, the same in all rows.
  on_each_attention_kernel(45, [](const Execution& execution, const Attention& whole) {
    for (const std::int32_t keys : {1, 5}) {
      Attention a = whole;
      for (std::size_t i = 0; i < a.indices.size(); ++i)
        a.indices[i] = 3 + static_cast<std::int32_t>(i) % static_cast<std::int32_t>(a.topk) % keys;
      expect_close(a, forward_backward(a, execution), forward_backward(a, on(Backend::reference)));
    }
  });
}

TEST(SparseAttentionBackward, DKvOfTheAccumulationTypeIsAddedTo) {
  on_each_attention_kernel(37, [](const Execution& execution, const Attention& a) {
    const AttentionOutputs outputs = forward(a, execution);
    const AttentionGradients alone = backward(a, outputs, execution);
    Attention more = a;
    more.d_kv_before = normals(static_cast<std::int64_t>(a.kv.size()), 37, "d_kv");
    more.d_sink_before = normals(a.heads, 37, "d_sink");
    AttentionGradients expected = alone;
    expected.d_kv = combined(1, alone.d_kv, 1, more.d_kv_before);
    if (!a.sink.empty()) expected.d_sink = combined(1, alone.d_sink, 1, more.d_sink_before);
    // The limit of fp32 sums applies, whatever the input type.
    Attention as_f32 = a;
    as_f32.dtype = DType::f32;
    expect_close(as_f32, backward(more, outputs, execution), expected);
  });
}

TEST(SparseAttentionBackward, DKvOfTheInputTypeIsOverwritten) {
  on_each_kernel("sparse_attention", [](const Execution& execution) {
    std::vector<Attention> shapes = {{}};
    if (execution.backend != Backend::reference) {  // where kernels differ in how they round
      shapes.push_back({.keys = 300, .heads = 20, .qk_dim = 576, .v_dim = 512, .topk = 128});
      shapes.push_back({.keys = 300, .heads = 20, .qk_dim = 512, .v_dim = 512, .topk = 128});
    }
    for (Attention shape : shapes)
      for (const DType dtype : {DType::bf16, DType::f16}) {
        SCOPED_TRACE(fmt::format("{}, qk_dim {}", name(dtype), shape.qk_dim));
        shape.dtype = dtype;
        Attention a = with_sink(filled(shape, 38), 38);
        const AttentionOutputs outputs = forward(a, execution);
        const AttentionGradients sums = backward(a, outputs, execution);
        a.d_kv_type = dtype;
        const AttentionGradients rounded = backward(a, outputs, execution);
        // One rounding: half an ulp of the value, plus the difference of fp32 sums.
        const double ulp = dtype == DType::bf16 ? 0x1p-8 : 0x1p-11;
        const double largest = *std::max_element(sums.d_kv.begin(), sums.d_kv.end());
        for (std::size_t i = 0; i < sums.d_kv.size(); ++i)
          ASSERT_NEAR(rounded.d_kv[i], sums.d_kv[i], ulp * std::abs(sums.d_kv[i]) + 1e-6 * largest);
      }
  });
}

TEST(SparseAttentionBackward, HeadPassesChangeOnlyTheOrderOfSums) {
  on_each_attention_kernel(39, [](const Execution& execution, const Attention& whole) {
    for (const DType d_kv_type : {DType::f32, whole.dtype}) {
      Attention a = whole;
      a.d_kv_type = d_kv_type;
      const AttentionOutputs outputs = forward(a, execution);
      const AttentionGradients expected = backward(a, outputs, execution);
      for (const std::int64_t heads : {std::int64_t{1}, a.heads / 2, a.heads, a.heads + 5}) {
        a.max_heads_per_pass = static_cast<std::int32_t>(heads);
        const AttentionGradients gradients = backward(a, outputs, execution);
        expect_close(a, gradients, expected);
        EXPECT_TRUE(same_bits(gradients.d_q, expected.d_q));
      }
    }
  });
}

TEST(SparseAttentionBackward, ASinkOfMinusInfinityIsNoSink) {
  on_each_attention_kernel(40, [](const Execution& execution, const Attention& whole) {
    Attention without = whole;
    without.sink.clear();
    Attention with = whole;
    with.sink.assign(static_cast<std::size_t>(whole.heads), -kInfinity);
    AttentionGradients expected = forward_backward(without, execution);
    expected.d_sink.assign(static_cast<std::size_t>(whole.heads), 0);
    expect_close(whole, forward_backward(with, execution), expected);
  });
}

TEST(SparseAttentionBackward, WithASinkOfPlusInfinityOnlyDLseCounts) {
  on_each_attention_kernel(41, [](const Execution& execution, const Attention& whole) {
    Attention only_d_lse = whole;
    only_d_lse.sink.clear();
    only_d_lse.d_out.assign(whole.d_out.size(), 0);
    Attention with = whole;
    with.sink.assign(static_cast<std::size_t>(whole.heads), kInfinity);
    AttentionGradients expected = forward_backward(only_d_lse, execution);
    expected.d_sink.assign(static_cast<std::size_t>(whole.heads), 0);
    const AttentionGradients gradients = forward_backward(with, execution);
    expect_close(whole, gradients, expected);
    EXPECT_TRUE(all_zero(gradients.d_sink));
  });
}

TEST(SparseAttentionBackward, AnAbsentDLseIsZero) {
  on_each_attention_kernel(42, [](const Execution& execution, const Attention& whole) {
    Attention zero = whole;
    zero.d_lse.assign(whole.d_lse.size(), 0);
    Attention absent = whole;
    absent.d_lse.clear();
    expect_close(whole, forward_backward(absent, execution), forward_backward(zero, execution));
  });
}

TEST(SparseAttentionBackward, DSinkIsOptional) {
  on_each_kernel("sparse_attention", [](const Execution& execution) {
    const Attention a = with_sink(filled({}, 43), 43);
    const AttentionOutputs outputs = forward(a, execution);
    AttentionBackwardWork work(a, outputs, harness::device_of(execution.backend));
    work.args.d_sink = {};
    run_where_taken(work.args, deterministic(execution));
    const AttentionGradients without = work.gradients();
    const AttentionGradients with = backward(a, outputs, deterministic(execution));
    EXPECT_TRUE(same_bits(without.d_q, with.d_q));
    EXPECT_TRUE(same_bits(without.d_kv, with.d_kv));
  });
}

TEST(SparseAttentionBackward, DQOfARowDependsOnThatRowAlone) {
  on_each_attention_kernel(44, [](const Execution& execution, const Attention& a) {
    const AttentionOutputs outputs = forward(a, execution);
    const AttentionGradients together = backward(a, outputs, execution);
    const std::int64_t row = a.heads * a.qk_dim;
    // Of many rows some 40.
    const std::int64_t step = std::max<std::int64_t>(1, a.tokens / 40);
    for (std::int64_t t = 0; t < a.tokens; t += step) {
      const AttentionGradients alone =
          backward(rows_of(a, t, 1), rows_of(a, outputs, t, 1), execution);
      EXPECT_TRUE(same_bits(alone.d_q, part(together.d_q, t * row, row)));
    }
  });
}

// Of 132 thread blocks 58, one or none have a row more than others, or most have none.
TEST(SparseAttentionBackward, AnyNumberOfRowsHasTheGradientsOfItsRows) {
  on_each_kernel("sparse_attention", [](const Execution& execution) {
    if (execution.backend == Backend::reference) return;  // it is what others are compared with
    Execution in_pieces = deterministic(execution);
    in_pieces.workspace_limit = 2 << 20;
    for (const std::int64_t qk_dim : {576, 512}) {
      const Attention all = with_sink(filled({.tokens = 190,
                                              .keys = 1500,
                                              .heads = 3,
                                              .qk_dim = qk_dim,
                                              .v_dim = 512,
                                              .topk = 70,
                                              .scale = 0.0625F},
                                             49),
                                      49);
      const AttentionOutputs outputs = forward(all, execution);
      for (const Execution& of_calls : {execution, deterministic(execution), in_pieces}) {
        const AttentionBackwardWork work(all, outputs, harness::device_of(execution.backend));
        if (!is_taken(work.args, of_calls)) continue;
        SCOPED_TRACE(fmt::format("qk_dim {}, deterministic {}, workspace_limit {}", qk_dim,
                                 of_calls.deterministic, of_calls.workspace_limit));
        Values d_q;  // of all rows
        for (const std::int64_t tokens : {190, 133, 132, 3, 2, 1}) {
          SCOPED_TRACE(tokens);
          const Attention a = rows_of(all, 0, tokens);
          const AttentionOutputs of_rows = rows_of(all, outputs, 0, tokens);
          const AttentionGradients gradients = backward(a, of_rows, of_calls);
          expect_close(a, gradients, backward(a, of_rows, on(Backend::reference)));
          if (d_q.empty()) d_q = gradients.d_q;
          d_q.resize(gradients.d_q.size());
          EXPECT_TRUE(same_bits(gradients.d_q, d_q));
        }
      }
    }
  });
}

// Thread blocks of Hopper's kernel wait for each other where keys and their gradients exceed L2,
// unless all lists are alike: then they start one after the other.
TEST(SparseAttentionBackward, OnCudaManyKeysGiveTheGradientsOfADeterministicCall) {
  if (!has_cuda()) GTEST_SKIP();
  on_each_kernel("sparse_attention", [](const Execution& execution) {
    if (execution.backend != Backend::cuda) return;
    Attention a = filled({.tokens = 300,
                          .keys = 16384,
                          .heads = 64,
                          .qk_dim = 576,
                          .v_dim = 512,
                          .topk = 128,
                          .scale = 0.0625F},
                         48);
    const AttentionForwardWork work(a, harness::device_of(execution.backend));
    if (!is_taken(work.args, execution)) return;
    for (const bool are_alike : {false, true}) {
      SCOPED_TRACE(are_alike);
      if (are_alike) {
        for (std::int64_t i = 0; i < a.rows() * a.topk; ++i)
          a.indices[i] = static_cast<std::int32_t>(i % a.topk * (a.keys / a.topk));
      }
      const AttentionOutputs outputs = forward(a, execution);
      expect_close(a, backward(a, outputs, execution),
                   backward(a, outputs, deterministic(execution)));
    }
  });
}

/// How many thread blocks Hopper's kernel has: with one row more it splits lists between them, and
/// needs a workspace. Some of the rows of `a`, whose keys fit into L2, must suffice for that.
std::int64_t thread_blocks(const Attention& a, const Execution& execution) {
  const auto heads = static_cast<std::size_t>(a.tokens * a.heads);
  const AttentionOutputs none = {Values(heads * a.v_dim), Values(heads), Values(heads)};
  for (std::int64_t rows = 1; rows <= a.tokens; ++rows) {
    const AttentionBackwardWork work(rows_of(a, 0, rows), rows_of(a, none, 0, rows),
                                     harness::device_of(execution.backend));
    if (workspace_bytes(work.args, execution) > 0) return rows - 1;
  }
  ADD_FAILURE() << "no lists are split";
  return 1;
}

/// Lists of any lengths, of which three quarters hold no key in some of their blocks of 64 slots.
void punch_holes(Attention& a, std::int64_t shift) {
  const Random random(50, "lengths");
  a.lengths.clear();
  for (std::int64_t row = 0; row < a.rows(); ++row) {
    // The lists of the last rows have no block, few or many.
    const std::int64_t last[] = {4 * 64, 0, 190, 6 * 64, a.topk};
    const std::int64_t rows_left = a.tokens - 1 - row % a.tokens;
    a.lengths.push_back(
        static_cast<std::int32_t>(rows_left < 5 ? last[rows_left] : random.below(row, 130)));
    const auto list = a.indices.begin() + row * a.topk;
    const std::int64_t kind = (row % a.tokens + shift) % 4;
    if (kind == 0) std::fill(list, list + 64, -1);
    if (kind == 1) std::fill(list + 64, list + a.topk, -1);
    if (kind == 2) std::fill(list, list + a.topk, -1);
  }
}

// Hopper's kernel splits the lists of a last round of thread blocks that has few: long ones in
// parts, short ones, with those of the round before, in pairs.
TEST(SparseAttentionBackward, OnHopperSplitListsGiveTheSameGradients) {
  if (!has_cuda()) GTEST_SKIP();
  const Execution execution{.backend = Backend::cuda, .kernel = "sm90"};
  Execution whole = execution;
  whole.workspace_limit = 0;
  const Attention shapes[] = {{.batch = 2, .heads = 3, .qk_dim = 576},
                              {.heads = 65, .qk_dim = 512, .dtype = DType::f16}};
  for (Attention shape : shapes) {
    shape.keys = 1700;
    shape.v_dim = 512;
    shape.topk = 400;
    shape.scale = 0.0625F;
    Attention few = shape;
    few.batch = 0;
    few.tokens = 300;
    few.heads = 1;
    few = filled(few, 50);
    const AttentionForwardWork work(rows_of(few, 0, 1), harness::device_of(execution.backend));
    if (!is_taken(work.args, execution)) GTEST_SKIP() << "no Hopper GPU";
    const std::int64_t blocks = thread_blocks(few, execution);
    for (const std::int64_t topk : {1600, 400}) {
      shape.topk = topk;
      // One round after some, or after two, of items: 64 heads of a row, or one.
      shape.tokens = shape.heads == 3 ? 6 * blocks + 5 : blocks + 3;
      const Attention all = with_sink(filled(shape, 50), 50);
      for (const std::int64_t shift : {0, 1, 2, 3}) {
        SCOPED_TRACE(fmt::format("{} heads, topk {}, shift {}", shape.heads, topk, shift));
        Attention a = all;
        punch_holes(a, shift);
        const AttentionOutputs outputs = forward(a, execution);
        const AttentionBackwardWork backward_work(a, outputs,
                                                  harness::device_of(execution.backend));
        EXPECT_GT(workspace_bytes(backward_work.args, execution), 0);
        EXPECT_EQ(workspace_bytes(backward_work.args, whole), 0);
        const AttentionGradients expected = backward(a, outputs, whole);
        const AttentionGradients gradients = backward(a, outputs, execution);
        EXPECT_TRUE(same_bits(gradients.d_q, expected.d_q));
        expect_close(a, gradients, expected);
      }
    }
  }
}

TEST(SparseAttentionBackward, DeterministicRepeatsGiveTheSameBits) {
  on_each_kernel("sparse_attention", [](const Execution& execution) {
    Attention a = with_sink(filled({.tokens = 200, .keys = 12, .topk = 8}, 45), 45);
    for (const DType d_kv_type : {DType::f32, DType::bf16}) {
      a.d_kv_type = d_kv_type;
      const AttentionOutputs outputs = forward(a, execution);
      const AttentionGradients first = backward(a, outputs, deterministic(execution));
      for (int i = 0; i < 5; ++i)
        expect_same_bits(backward(a, outputs, deterministic(execution)), first);
      expect_close(a, backward(a, outputs, execution), first);
    }
  });
}

TEST(SparseAttentionBackward, ThreadsChangeNoBitOfADeterministicCall) {
  on_each_attention_kernel(46, [](const Execution& execution, const Attention& a) {
    const AttentionOutputs outputs = forward(a, execution);
    const AttentionGradients expected = backward(a, outputs, deterministic(execution));
    for (const int threads : {1, 2, 5, 1024})
      expect_same_bits(backward(a, outputs, on_threads(threads, deterministic(execution))),
                       expected);
  });
}

TEST(SparseAttentionBackward, ABatchIsItsSlices) {
  on_each_attention_kernel(47, [](const Execution& execution, const Attention& shape) {
    Attention batch = shape;
    batch.batch = 3;
    batch = filled(batch, 47);
    const AttentionOutputs outputs = forward(batch, execution);
    const AttentionGradients together = backward(batch, outputs, deterministic(execution));
    AttentionGradients slices;
    slices.d_sink.resize(shape.sink.size());
    for (std::int64_t b = 0; b < batch.batch; ++b) {
      const std::int64_t kv_size = batch.keys * batch.qk_dim;
      Attention slice = rows_of(batch, b * batch.tokens, batch.tokens);
      slice.batch = 0;
      slice.kv = part(batch.kv, b * kv_size, kv_size);
      const AttentionGradients alone = backward(
          slice, rows_of(batch, outputs, b * batch.tokens, batch.tokens), deterministic(execution));
      slices.d_q.insert(slices.d_q.end(), alone.d_q.begin(), alone.d_q.end());
      slices.d_kv.insert(slices.d_kv.end(), alone.d_kv.begin(), alone.d_kv.end());
      slices.d_sink = combined(1, slices.d_sink, 1, alone.d_sink);
    }
    EXPECT_TRUE(same_bits(together.d_q, slices.d_q));
    EXPECT_TRUE(same_bits(together.d_kv, slices.d_kv));
    expect_close(batch, together, slices);
  });
}

}  // namespace
}  // namespace winnow::tests
