// SPDX-License-Identifier: Apache-2.0
// sparse_attention forward: valid and invalid indices, the sink, independence of rows.
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>

#include "tests/attention_calls.h"

namespace winnow::tests {
namespace {

/// Every row lists all keys, in ascending order.
Attention with_all_keys(Attention a) {
  a.topk = a.keys;
  a.indices.resize(static_cast<std::size_t>(a.rows() * a.keys));
  for (std::int64_t i = 0; i < a.rows() * a.keys; ++i)
    a.indices[i] = static_cast<std::int32_t>(i % a.keys);
  return a;
}

/// Makes all indices of row t invalid.
void clear_row(Attention& a, std::int64_t t) {
  for (std::int64_t j = 0; j < a.topk; ++j) a.indices[t * a.topk + j] = -1;
}

TEST(SparseAttention, FollowsTheFormula) {
  on_each_attention_kernel(1, [](const Execution& execution, const Attention& a) {
    expect_close(a, forward(a, execution), plain_attention(a));
  });
}

TEST(SparseAttention, AllKeysSelectedIsDenseAttention) {
  on_each_attention_kernel(2, [](const Execution& execution, const Attention& chosen) {
    const Attention a = with_all_keys(chosen);
    const AttentionOutputs dense = plain_attention(a);
    expect_close(a, forward(a, execution), dense);
  });
}

TEST(SparseAttention, OrderOfSlotsDoesNotMatter) {
  on_each_attention_kernel(3, [](const Execution& execution, const Attention& a) {
    Attention reversed = a;
    for (std::int64_t t = 0; t < a.rows(); ++t)
      std::reverse(reversed.indices.begin() + t * a.topk,
                   reversed.indices.begin() + (t + 1) * a.topk);
    ASSERT_NE(reversed.indices, a.indices);
    expect_close(a, forward(reversed, execution), forward(a, execution));
  });
}

TEST(SparseAttention, SlotsBetweenKeysMayHoldNone) {
  on_each_attention_kernel(4, [](const Execution& execution, const Attention& a) {
    Attention spread = a;
    spread.topk = 2 * a.topk;
    spread.indices.assign(static_cast<std::size_t>(a.rows() * spread.topk), -1);
    for (std::int64_t i = 0; i < a.rows() * a.topk; ++i) spread.indices[2 * i + 1] = a.indices[i];
    expect_close(a, forward(spread, execution), forward(a, execution));
  });
}

TEST(SparseAttention, ListsMayBeLongerThanThereAreKeys) {
  on_each_kernel("sparse_attention", [](const Execution& execution) {
    // All keys in random order, and 13 invalid slots.
    const Attention a = filled({.tokens = 4, .keys = 110, .topk = 123}, 21);
    const AttentionOutputs outputs = forward(a, execution);
    expect_close(a, outputs, plain_attention(a));

    Attention narrow = a;
    narrow.topk = a.keys;
    narrow.indices.clear();
    for (std::int64_t t = 0; t < a.rows(); ++t) {
      const Ints keys = part(a.indices, t * a.topk, a.keys);
      narrow.indices.insert(narrow.indices.end(), keys.begin(), keys.end());
    }
    expect_close(a, backward(a, outputs, execution), backward(narrow, outputs, execution));
  });
}

TEST(SparseAttention, EveryIndexOutsideTheKeysIsNone) {
  on_each_attention_kernel(5, [](const Execution& execution, const Attention& whole) {
    Attention a = whole;
    for (std::size_t i = 0; i < a.indices.size(); i += 3) a.indices[i] = -1;
    const AttentionOutputs expected = forward(a, execution);
    for (const std::int64_t none :
         {a.keys, a.keys + 1, std::int64_t{kMaxInt32}, std::int64_t{-2}, std::int64_t{kMinInt32}}) {
      for (std::size_t i = 0; i < a.indices.size(); i += 3)
        a.indices[i] = static_cast<std::int32_t>(none);
      SCOPED_TRACE(none);
      expect_same_bits(forward(a, execution), expected);
    }
  });
}

TEST(SparseAttention, KeysThatNoSlotNamesAreNotRead) {
  on_each_attention_kernel(6, [](const Execution& execution, const Attention& whole) {
    Attention a = whole;
    for (std::int32_t& index : a.indices)
      if (index % 4 == 0) index = -1;
    const AttentionOutputs expected = forward(a, execution);
    Attention spoilt = a;
    for (std::int64_t s = 0; s < a.keys; s += 4)
      for (std::int64_t d = 0; d < a.qk_dim; ++d)
        spoilt.kv[s * a.qk_dim + d] = d % 2 == 0 ? kNaN : kInfinity;
    expect_same_bits(forward(spoilt, execution), expected);
  });
}

TEST(SparseAttention, SlotsPastLengthsHoldNone) {
  on_each_attention_kernel(7, [](const Execution& execution, const Attention& whole) {
    Attention a = whole;
    a.lengths.resize(static_cast<std::size_t>(a.tokens));
    for (std::int64_t t = 0; t < a.tokens; ++t)
      a.lengths[t] = static_cast<std::int32_t>(t * a.topk / (a.tokens - 1));  // 0 ... topk
    const AttentionOutputs cut_by_lengths = forward(a, execution);
    expect_close(a, cut_by_lengths, plain_attention(a));

    Attention cut_by_index = a;
    for (std::int64_t t = 0; t < a.tokens; ++t)
      for (std::int64_t j = a.lengths[t]; j < a.topk; ++j)
        cut_by_index.indices[t * a.topk + j] = -1;
    expect_same_bits(forward(cut_by_index, execution), cut_by_lengths);
    cut_by_index.lengths.clear();
    expect_close(a, forward(cut_by_index, execution), cut_by_lengths);
  });
}

TEST(SparseAttention, AKeyThatStandsTwiceCountsTwice) {
  on_each_attention_kernel(8, [](const Execution& execution, const Attention& whole) {
    Attention a = whole;
    for (std::int64_t t = 0; t < a.tokens; ++t) a.indices[t * a.topk + 1] = a.indices[t * a.topk];
    expect_close(a, forward(a, execution), plain_attention(a));

    // The same key in all slots: out is its value, lse is its score + log(topk).
    for (std::int64_t i = 0; i < a.rows() * a.topk; ++i)
      a.indices[i] = a.indices[i / a.topk * a.topk];
    a.sink.clear();
    const AttentionOutputs one_key = forward(a, execution);
    const Values kv = as_stored(a.dtype, a.kv);
    Values value;
    Values lse = one_key.max_logits;
    for (std::int64_t row = 0; row < a.rows() * a.heads; ++row) {
      const std::int64_t key = a.indices[row / a.heads * a.topk];
      value.insert(value.end(), kv.begin() + key * a.qk_dim, kv.begin() + key * a.qk_dim + a.v_dim);
      lse[row] += std::log(static_cast<double>(a.topk));
    }
    expect_close(a, one_key, {value, lse, one_key.max_logits});
  });
}

TEST(SparseAttention, RowsWithoutKeysGiveZero) {
  on_each_attention_kernel(9, [](const Execution& execution, const Attention& whole) {
    Attention a = whole;
    for (std::int64_t t = 0; t < a.tokens; t += 2) clear_row(a, t);
    const AttentionOutputs outputs = forward(a, execution);
    expect_close(a, outputs, plain_attention(a));
    for (std::int64_t t = 0; t < a.tokens; t += 2) {
      const AttentionOutputs row = rows_of(a, outputs, t, 1);
      EXPECT_TRUE(all_zero(row.out));
      EXPECT_TRUE(all_equal(row.lse, -kInfinity));
      EXPECT_TRUE(all_equal(row.max_logits, -kInfinity));
    }
  });
}

TEST(SparseAttention, NoKeysAtAllGiveZero) {
  on_each_kernel("sparse_attention", [](const Execution& execution) {
    const Attention a = with_sink(filled({.tokens = 3, .keys = 0, .topk = 4}, 10), 10);
    const AttentionOutputs outputs = forward(a, execution);
    EXPECT_TRUE(all_zero(outputs.out));
    EXPECT_TRUE(all_equal(outputs.lse, -kInfinity));
  });
}

TEST(SparseAttention, ASinkOfMinusInfinityIsNoSink) {
  on_each_attention_kernel(11, [](const Execution& execution, const Attention& a) {
    Attention without = a;
    without.sink.clear();
    Attention with = a;
    with.sink.assign(static_cast<std::size_t>(a.heads), -kInfinity);
    expect_close(a, forward(with, execution), forward(without, execution));
    clear_row(with, 0);
    EXPECT_TRUE(all_zero(rows_of(a, forward(with, execution), 0, 1).out));
  });
}

TEST(SparseAttention, ASinkOfPlusInfinityTakesEverything) {
  on_each_attention_kernel(12, [](const Execution& execution, const Attention& a) {
    Attention with = a;
    with.sink.assign(static_cast<std::size_t>(a.heads), kInfinity);
    Attention without = a;
    without.sink.clear();
    const AttentionOutputs outputs = forward(with, execution);
    const AttentionOutputs expected = forward(without, execution);
    EXPECT_TRUE(all_zero(outputs.out));
    expect_close(a, {expected.out, outputs.lse, outputs.max_logits}, expected);
  });
}

TEST(SparseAttention, ASinkFarFromTheScoresOverflowsNothing) {
  on_each_kernel("sparse_attention", [](const Execution& execution) {
    Attention a = filled({.heads = 4}, 13);
    a.sink = {200, -200, 3e38, -3e38};
    const AttentionOutputs outputs = forward(a, execution);
    expect_close(a, outputs, plain_attention(a));
    a.heads = 4;
    for (std::int64_t t = 0; t < a.tokens; ++t) {
      EXPECT_TRUE(all_zero(part(outputs.out, (t * a.heads + 2) * a.v_dim, a.v_dim)));
    }
  });
}

TEST(SparseAttention, TheSinkChangesOutAndNotLse) {
  on_each_kernel("sparse_attention", [](const Execution& execution) {
    const Attention without = filled({}, 14);
    Attention with = without;
    with.sink = {0.5, 1, 2};
    const AttentionOutputs a = forward(with, execution);
    const AttentionOutputs b = forward(without, execution);
    EXPECT_TRUE(same_bits(a.max_logits, b.max_logits));
    EXPECT_TRUE(ok(compare("lse", a.lse, b.lse, harness::lse_limit(without.dtype),
                           harness::at_least_one(b.lse))));
    EXPECT_FALSE(compare("out", a.out, b.out, harness::output_limit(without.dtype)).ok);
  });
}

TEST(SparseAttention, LargeScoresOverflowNothing) {
  on_each_attention_kernel(15, [](const Execution& execution, const Attention& whole) {
    Attention a = whole;
    for (double& value : a.q) value *= 1e4;
    expect_close(a, forward(a, execution), plain_attention(a));
  });
}

TEST(SparseAttention, RoundingOfPIsNoFactorOfOut) {
  // A key that comes late and has nearly all of p. In bf16 its e^15.25 is off by 2^-8.
  on_each_kernel("sparse_attention", [](const Execution& execution) {
    Attention a =
        filled({.tokens = 1, .keys = 97, .heads = 64, .qk_dim = 576, .v_dim = 512, .topk = 97}, 29);
    a = with_all_keys(a);
    a.scale = 1.90663898F;
    std::fill(a.q.begin(), a.q.end(), 0.0);
    for (std::int64_t h = 0; h < a.heads; ++h) a.q[(h + 1) * a.qk_dim - 1] = 1;
    for (std::int64_t s = 0; s < a.keys; ++s) a.kv[(s + 1) * a.qk_dim - 1] = s == 96 ? 8 : 0;
    expect_close(a, forward(a, execution), plain_attention(a));
    a.sink.assign(static_cast<std::size_t>(a.heads), 15);
    expect_close(a, forward(a, execution), plain_attention(a));
  });
}

TEST(SparseAttention, ScaleOfZeroIsTheDefault) {
  on_each_kernel("sparse_attention", [](const Execution& execution) {
    Attention a = filled({.qk_dim = 24, .v_dim = 24, .scale = 0}, 16);
    const AttentionOutputs by_default = forward(a, execution);
    a.scale = static_cast<float>(1 / std::sqrt(24.0));
    expect_same_bits(by_default, forward(a, execution));
    a.scale = -0.5F;
    expect_close(a, forward(a, execution), plain_attention(a));
  });
}

TEST(SparseAttention, MaxLogitsAreOptional) {
  on_each_attention_kernel(17, [](const Execution& execution, const Attention& a) {
    Attention plain = a;
    plain.wants_max_logits = false;
    AttentionOutputs with = forward(a, execution);
    const AttentionOutputs without = forward(plain, execution);
    with.max_logits.clear();
    expect_same_bits(without, with);
  });
}

// ---- Independence of rows.

TEST(SparseAttention, RowsDoNotDependOnTheirNeighbours) {
  on_each_attention_kernel(18, [](const Execution& execution, const Attention& a) {
    const AttentionOutputs together = forward(a, execution);
    const std::int64_t step = std::max<std::int64_t>(1, a.tokens / 40);  // of many rows some 40
    for (std::int64_t t = 0; t < a.tokens; t += step)
      expect_same_bits(forward(rows_of(a, t, 1), execution), rows_of(a, together, t, 1));
    const std::int64_t half = a.tokens / 2;
    expect_same_bits(forward(rows_of(a, half, a.tokens - half), execution),
                     rows_of(a, together, half, a.tokens - half));
  });
}

// Where keys exceed 32 MiB, thread blocks of Hopper's kernel look at some lists, and start further
// apart if they are alike. Results cannot tell what they found.
TEST(SparseAttention, OnCudaRowsOfManyKeysDoNotDependOnTheirNeighbours) {
  if (!has_cuda()) GTEST_SKIP();
  const Attention random = filled({.tokens = 300,
                                   .keys = 30000,
                                   .heads = 64,
                                   .qk_dim = 576,
                                   .v_dim = 512,
                                   .topk = 512,
                                   .scale = 0.0625F},
                                  49);
  Attention alike = random;
  for (std::int64_t i = 0; i < alike.rows() * alike.topk; ++i)
    alike.indices[i] = static_cast<std::int32_t>(i % alike.topk * (alike.keys / alike.topk));
  Attention with_holes = alike;
  for (std::int64_t t = 0; t < with_holes.tokens; ++t) {
    constexpr std::int64_t kLengths[] = {-5, 0, 1, 300, 512, 600};
    with_holes.lengths.push_back(static_cast<std::int32_t>(kLengths[t % std::size(kLengths)]));
    with_holes.indices[t * with_holes.topk + t % 256] = t % 2 == 0 ? -1 : kMaxInt32;
  }
  on_each_kernel("sparse_attention", [&](const Execution& execution) {
    if (execution.backend != Backend::cuda) return;
    const AttentionForwardWork work(random, harness::device_of(execution.backend));
    if (!is_taken(work.args, execution)) return;
    const auto expect_independent_rows = [&](const char* lists, const Attention& a) {
      SCOPED_TRACE(lists);
      const AttentionOutputs together = forward(a, execution);
      for (const std::int64_t t : {0, 1, 2, 3, 131, 132, 298, 299})
        expect_same_bits(forward(rows_of(a, t, 1), execution), rows_of(a, together, t, 1));
    };
    expect_independent_rows("random", random);
    expect_independent_rows("alike", alike);
    expect_independent_rows("alike, with holes", with_holes);
  });
}

TEST(SparseAttention, PackedDocumentsEqualEachAlone) {
  on_each_attention_kernel(19, [](const Execution& execution, const Attention& document) {
    const int documents = 3;
    Attention packed = document;
    packed.tokens *= documents;
    packed.keys *= documents;
    packed = filled(packed, 19);
    for (std::int64_t t = 0; t < packed.tokens; ++t) {  // each row sees its own document only
      const std::int64_t first = t / document.tokens * document.keys;
      for (std::int64_t j = 0; j < packed.topk; ++j)
        packed.indices[t * packed.topk + j] = static_cast<std::int32_t>(
            first + document.indices[t % document.tokens * packed.topk + j]);
    }
    const AttentionOutputs together = forward(packed, execution);
    for (int i = 0; i < documents; ++i) {
      Attention alone = rows_of(packed, i * document.tokens, document.tokens);
      alone.keys = document.keys;
      alone.kv = part(packed.kv, i * document.keys * packed.qk_dim, document.keys * packed.qk_dim);
      alone.indices = document.indices;
      expect_same_bits(forward(alone, execution),
                       rows_of(packed, together, i * document.tokens, document.tokens));
    }
  });
}

TEST(SparseAttention, ABatchIsItsSlices) {
  on_each_attention_kernel(20, [](const Execution& execution, const Attention& shape) {
    Attention batch = shape;
    batch.batch = 3;
    batch = filled(batch, 20);
    batch.lengths.assign(static_cast<std::size_t>(batch.rows()),
                         static_cast<std::int32_t>(batch.topk - 1));
    const AttentionOutputs together = forward(batch, execution);
    for (std::int64_t b = 0; b < batch.batch; ++b) {
      Attention slice = rows_of(batch, b * batch.tokens, batch.tokens);
      slice.batch = 0;
      slice.kv = part(batch.kv, b * batch.keys * batch.qk_dim, batch.keys * batch.qk_dim);
      expect_same_bits(forward(slice, execution),
                       rows_of(batch, together, b * batch.tokens, batch.tokens));
    }
  });
}

// The first slice alone would suit kernels that load 16 bytes at a time.
TEST(SparseAttention, SlicesOfABatchMayBeAlignedUnlikeTheFirst) {
  on_each_backend([](Backend backend) {
    const Attention batch = filled({.batch = 3,
                                    .tokens = 2,
                                    .keys = 5,
                                    .qk_dim = 576,
                                    .v_dim = 512,
                                    .topk = 4,
                                    .scale = 0.05F},
                                   23);
    const Device device = harness::device_of(backend);
    AttentionForwardWork work(batch, device);
    const std::int64_t slice = batch.keys * batch.qk_dim;
    const std::int64_t stride = slice + 4;  // 8 bytes past a multiple of 16
    Values spread(static_cast<std::size_t>(batch.batch * stride));
    for (std::int64_t i = 0; i < batch.batch * slice; ++i)
      spread[i / slice * stride + i % slice] = batch.kv[i];
    const Buffer kv = floats(device, batch.dtype, {batch.batch * stride}, spread);
    work.args.kv.data = kv.tensor().data;
    work.args.kv.stride[0] = stride;
    sparse_attention_forward(work.args, on(backend));
    expect_close(batch, work.outputs(), plain_attention(batch));
  });
}

// torch calls a tensor without elements contiguous whatever its strides are.
TEST(SparseAttention, ABatchWithoutRowsMayHaveAnyStride) {
  on_each_backend([](Backend backend) {
    const Attention empty = filled(Attention{.batch = 2, .tokens = 0}, 24);
    AttentionForwardWork work(empty, harness::device_of(backend));
    work.args.q.stride[0] = work.args.out.stride[0] = std::numeric_limits<std::int64_t>::max();
    EXPECT_EQ(refusal_of([&] { sparse_attention_forward(work.args, on(backend)); }), "");
  });
}

TEST(SparseAttention, RepeatsGiveTheSameBits) {
  on_each_attention_kernel(21, [](const Execution& execution, const Attention& a) {
    const AttentionOutputs first = forward(a, execution);
    for (int i = 0; i < 10; ++i) expect_same_bits(forward(a, execution), first);
  });
}

TEST(SparseAttention, ThreadsChangeNoBit) {
  on_each_attention_kernel(22, [](const Execution& execution, const Attention& a) {
    const AttentionOutputs expected = forward(a, execution);
    for (const int threads : {1, 2, 5, 1024})
      expect_same_bits(forward(a, on_threads(threads, execution)), expected);
  });
}

}  // namespace
}  // namespace winnow::tests
