// SPDX-License-Identifier: Apache-2.0
// dense_index_loss: equals the sparse loss with whole windows selected; independence of rows.
#include <algorithm>
#include <cmath>
#include <utility>

#include "tests/attention_calls.h"
#include "tests/dense_loss_calls.h"
#include "tests/indexer_calls.h"

namespace winnow::tests {
namespace {

/// Calls body(execution) for every kernel.
template <class Body>
void on_each_loss_kernel(const Body& body) {
  on_each_kernel("dense_index_loss", body);
}

/// Calls body(execution, loss) for every kernel, several shapes and types, with and without a sink.
template <class Body>
void on_each_loss(std::uint64_t seed, const Body& body) {
  on_each_loss_kernel([&](const Execution& execution) {
    std::vector<DenseLoss> shapes = {
        {}, {.dtype = DType::f16}, {.dtype = DType::f32}, {.index_keys = 18, .key_offset = 0}};
    if (execution.backend != Backend::reference)
      shapes.push_back({.tokens = 4,
                        .keys = 300,
                        .index_keys = 300,
                        .key_offset = 0,
                        .heads = 16,
                        .qk_dim = 576,
                        .index_heads = 32,
                        .index_dim = 128,
                        .scale = 0.0625F});
    for (const DenseLoss& shape : shapes) {
      DenseLoss d = filled(shape, seed);
      const DenseLossWork work(d, harness::device_of(execution.backend));
      if (!is_taken(work.forward, execution)) continue;
      SCOPED_TRACE(fmt::format("{}, {} keys from {}", name(d.dtype), d.index_keys, d.key_offset));
      body(execution, d);
      d.sink = normals(d.heads, seed, "sink");
      body(execution, d);
    }
  });
}

void expect_close(const DenseLoss& d, const DenseLossOutputs& actual,
                  const DenseLossOutputs& expected) {
  EXPECT_TRUE(ok(compare("loss", actual.loss, expected.loss, harness::loss_limit(d.dtype),
                         harness::at_least_one(expected.loss))));
  EXPECT_TRUE(ok(compare("lse", actual.lse, expected.lse, harness::lse_limit(d.dtype),
                         harness::at_least_one(expected.lse))));
}

void expect_close(const DenseLoss& d, const DenseLossGradients& actual,
                  const DenseLossGradients& expected) {
  const harness::Limit limit = harness::gradient_limit(d.dtype);
  EXPECT_TRUE(ok(compare("d_index_q", actual.d_index_q, expected.d_index_q, limit)));
  EXPECT_TRUE(ok(compare("d_weights", actual.d_weights, expected.d_weights, limit)));
  EXPECT_TRUE(ok(compare("d_index_k", actual.d_index_k, expected.d_index_k, limit)));
}

void expect_same_bits(const DenseLossGradients& actual, const DenseLossGradients& expected) {
  EXPECT_TRUE(same_bits(actual.d_index_q, expected.d_index_q));
  EXPECT_TRUE(same_bits(actual.d_weights, expected.d_weights));
  EXPECT_TRUE(same_bits(actual.d_index_k, expected.d_index_k));
}

/// The same loss computed by the sparse operators with the whole window selected.
struct SparseWay {
  DenseLossOutputs outputs;
  DenseLossGradients gradients;
};

SparseWay sparse_way(const DenseLoss& d, Backend backend) {
  const Device device = harness::device_of(backend);
  Indexer ix{.tokens = d.tokens,
             .keys = d.index_keys,
             .heads = d.index_heads,
             .dim = d.index_dim,
             .topk = d.index_keys,
             .dtype = d.dtype};
  ix.q = d.index_q;
  ix.k = d.index_k;
  ix.weights = d.weights;
  ix.begin = d.begin;
  ix.end = d.end;
  const Selected selected = select(ix, on(backend));

  Attention a{.tokens = d.tokens,
              .keys = d.keys,
              .heads = d.heads,
              .qk_dim = d.qk_dim,
              .v_dim = 8,
              .topk = d.index_keys,
              .dtype = d.dtype,
              .scale = d.scale};
  a.q = d.q;
  a.kv = d.kv;
  a.sink = d.sink;
  a.lengths = selected.lengths;
  a.indices = selected.indices;
  for (std::int32_t& index : a.indices)
    if (index >= 0) index += d.key_offset;
  const AttentionOutputs attention = forward(a, on(backend));

  a.indices = selected.indices;
  AttentionForwardWork work(a, device);
  work.lse.upload(attention.lse);
  const Shape slots = {d.tokens, a.topk};
  work.memory.add("target", Buffer(device, DType::f32, slots));
  auto target = work.memory.arguments<IndexTarget>();
  target.scale = d.scale;
  target.key_offset = d.key_offset;
  run(target, on(backend));
  work.memory.add("scores", floats(device, DType::f32, slots, selected.scores));
  const Buffer& loss = work.memory.add("loss", Buffer(device, DType::f32, {d.tokens}));
  const Buffer& d_scores = work.memory.add("d_scores", Buffer(device, DType::f32, slots));
  run(work.memory.arguments<IndexLoss>(), on(backend));

  ix.indices = selected.indices;
  ix.lengths = selected.lengths;
  ix.d_scores = d_scores.download();
  for (std::size_t i = 0; i < ix.d_scores.size(); ++i) ix.d_scores[i] *= d.d_loss[i / ix.topk];
  const IndexGradients gradients = backward(ix, on(backend));
  return {{loss.download(), attention.lse}, {gradients.d_q, gradients.d_weights, gradients.d_k}};
}

TEST(DenseIndexLoss, IsTheSparseLossOverTheWholeWindow) {
  on_each_loss(1, [](const Execution& execution, const DenseLoss& d) {
    const SparseWay expected = sparse_way(d, execution.backend);
    const DenseLossOutputs outputs = forward(d, execution);
    expect_close(d, outputs, expected.outputs);
    expect_close(d, backward(d, outputs.lse, execution), expected.gradients);
    for (const double loss : outputs.loss) EXPECT_GE(loss, 0);
    EXPECT_GT(*std::max_element(outputs.loss.begin(), outputs.loss.end()), 0.01);
  });
}

TEST(DenseIndexLoss, OfWindowsWithFewerThanTwoKeysIsZero) {
  on_each_loss(2, [](const Execution& execution, const DenseLoss& whole) {
    DenseLoss d = whole;  // row 0 sees no key, row 1 sees one
    const DenseLossOutputs outputs = forward(d, execution);
    EXPECT_EQ(outputs.loss[0], 0);
    EXPECT_EQ(outputs.loss[1], 0);
    EXPECT_TRUE(all_equal(part(outputs.lse, 0, d.heads), -kInfinity));
    EXPECT_TRUE(std::isfinite(outputs.lse[d.heads]));

    const DenseLossGradients expected = backward(d, outputs.lse, deterministic(execution));
    d.d_loss[0] = kNaN;
    d.d_loss[1] = kInfinity;
    const DenseLossGradients gradients = backward(d, outputs.lse, deterministic(execution));
    expect_same_bits(gradients, expected);
    EXPECT_TRUE(all_zero(part(gradients.d_index_q, 0, 2 * d.index_heads * d.index_dim)));
    EXPECT_TRUE(all_zero(part(gradients.d_weights, 0, 2 * d.index_heads)));
  });
}

TEST(DenseIndexLoss, WithTheLseGivenIsTheSame) {
  on_each_loss(9, [](const Execution& execution, const DenseLoss& d) {
    const DenseLossOutputs outputs = forward(d, execution);
    const DenseLossOutputs given = forward(d, outputs.lse, execution);
    expect_close(d, given, outputs);
    EXPECT_TRUE(same_bits(given.lse, outputs.lse));
  });
}

// The attention of the model may see other keys beside those of the window: a part of every head's
// probability is theirs, and the loss normalises what is left.
TEST(DenseIndexLoss, TakesTheLseOfMoreKeysThanTheWindow) {
  on_each_loss(10, [](const Execution& execution, const DenseLoss& whole) {
    DenseLoss d = whole;
    d.sink.clear();
    const DenseLossOutputs outputs = forward(d, execution);
    Values lse = outputs.lse;
    for (double& value : lse) value += std::log(2.0);
    const Values loss = forward(d, as_stored(d.sum_type(), lse), execution).loss;
    EXPECT_TRUE(ok(compare("loss", loss, outputs.loss, harness::loss_limit(d.dtype),
                           harness::at_least_one(outputs.loss))));
  });
}

TEST(DenseIndexLoss, OfAnIndexerThatIsAttentionIsZero) {
  on_each_loss_kernel([](const Execution& execution) {
    DenseLoss d = filled({.index_keys = 18,
                          .key_offset = 0,
                          .heads = 1,
                          .index_heads = 1,
                          .index_dim = 24,
                          .dtype = DType::f32},
                         11);
    for (Values* values : {&d.q, &d.kv})
      for (double& value : *values) value = std::abs(value);  // relu lets every product pass
    d.index_q = d.q;
    d.index_k = d.kv;
    d.weights.assign(static_cast<std::size_t>(d.tokens), d.scale);
    const DenseLossOutputs outputs = forward(d, execution);
    const DenseLossGradients gradients = backward(d, outputs.lse, execution);
    for (const double loss : outputs.loss) EXPECT_NEAR(loss, 0, 1e-5);
    for (const Values* values : {&gradients.d_index_q, &gradients.d_weights, &gradients.d_index_k})
      for (const double value : *values) EXPECT_NEAR(value, 0, 1e-4);
  });
}

TEST(DenseIndexLoss, OfTwoKeysIsThatOfTwoNumbers) {
  on_each_loss_kernel([](const Execution& execution) {
    DenseLoss d = filled({.tokens = 1,
                          .keys = 2,
                          .index_keys = 2,
                          .key_offset = 0,
                          .heads = 1,
                          .qk_dim = 8,
                          .index_heads = 1,
                          .index_dim = 8,
                          .dtype = DType::f32,
                          .scale = 1},
                         12);
    d.begin = {0};
    d.end = {2};
    d.q = d.index_q = {1, 0, 0, 0, 0, 0, 0, 0};
    d.kv = {std::log(3.0), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0};  // 3/4 and 1/4
    d.index_k = {1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0};         // 1/2 each
    d.weights = d.d_loss = {1};
    const DenseLossOutputs outputs = forward(d, execution);
    EXPECT_NEAR(outputs.loss[0], 0.75 * std::log(1.5) + 0.25 * std::log(0.5), 1e-6);
    EXPECT_NEAR(outputs.lse[0], std::log(4.0), 1e-6);
    const DenseLossGradients gradients = backward(d, outputs.lse, execution);
    EXPECT_NEAR(gradients.d_index_k[0], -0.25, 1e-6);
    EXPECT_NEAR(gradients.d_index_k[8], 0.25, 1e-6);
    EXPECT_NEAR(gradients.d_weights[0], 0, 1e-6);  // both keys have the same product
  });
}

TEST(DenseIndexLoss, OfPackedDocumentsIsThatOfEach) {
  on_each_loss(13, [](const Execution& execution, const DenseLoss& whole) {
    DenseLoss packed = whole;  // two documents: rows and keys from the middle on are the second's
    const std::int64_t first_rows = packed.tokens / 2;
    const std::int64_t first_keys = packed.index_keys / 2;
    for (std::int64_t t = 0; t < packed.tokens; ++t) {
      const bool second = t >= first_rows;
      packed.begin[t] = static_cast<std::int32_t>(second ? first_keys : 0);
      packed.end[t] = static_cast<std::int32_t>(second ? packed.index_keys - (packed.tokens - 1 - t)
                                                       : first_keys - (first_rows - 1 - t));
    }
    const DenseLossOutputs outputs = forward(packed, execution);
    const DenseLossGradients gradients = backward(packed, outputs.lse, execution);
    DenseLossOutputs joined;
    DenseLossGradients joined_gradients;
    const auto append = [](Values& values, const Values& more) {
      values.insert(values.end(), more.begin(), more.end());
    };
    for (const bool second : {false, true}) {
      const std::int64_t from = second ? first_keys : 0;
      DenseLoss one = rows_of(packed, second ? first_rows : 0,
                              second ? packed.tokens - first_rows : first_rows);
      one.index_keys = second ? packed.index_keys - first_keys : first_keys;
      one.key_offset = 0;
      one.keys = one.index_keys;
      one.kv =
          part(packed.kv, (packed.key_offset + from) * packed.qk_dim, one.keys * packed.qk_dim);
      one.index_k = part(packed.index_k, from * packed.index_dim, one.keys * packed.index_dim);
      for (std::int32_t& key : one.begin) key -= static_cast<std::int32_t>(from);
      for (std::int32_t& key : one.end) key -= static_cast<std::int32_t>(from);
      const DenseLossOutputs of_one = forward(one, execution);
      append(joined.loss, of_one.loss);
      append(joined.lse, of_one.lse);
      const DenseLossGradients its = backward(one, of_one.lse, execution);
      append(joined_gradients.d_index_q, its.d_index_q);
      append(joined_gradients.d_weights, its.d_weights);
      append(joined_gradients.d_index_k, its.d_index_k);
    }
    expect_close(packed, joined, outputs);
    expect_close(packed, joined_gradients, gradients);
  });
}

TEST(DenseIndexLoss, ReadsNoKeyOutsideTheWindows) {
  on_each_loss(3, [](const Execution& execution, const DenseLoss& whole) {
    DenseLoss d = whole;
    for (std::int64_t t = 0; t < d.tokens; ++t) {  // the first and the last key are in no window
      d.begin[t] = std::max(d.begin[t], 1);
      d.end[t] = std::clamp(d.end[t], d.begin[t], static_cast<std::int32_t>(d.index_keys - 1));
    }
    d.d_index_k_before = normals(static_cast<std::int64_t>(d.index_k.size()), 3, "d_index_k");
    const DenseLossOutputs outputs = forward(d, execution);
    const DenseLossGradients expected = backward(d, outputs.lse, deterministic(execution));
    DenseLoss spoilt = d;
    for (std::int64_t s = 0; s < d.keys; ++s)
      if (s <= d.key_offset || s >= d.key_offset + d.index_keys - 1)
        std::fill_n(spoilt.kv.begin() + s * d.qk_dim, d.qk_dim, kNaN);
    std::fill_n(spoilt.index_k.begin(), d.index_dim, kNaN);
    std::fill_n(spoilt.index_k.end() - d.index_dim, d.index_dim, kNaN);
    const DenseLossOutputs same = forward(spoilt, execution);
    EXPECT_TRUE(same_bits(same.loss, outputs.loss));
    EXPECT_TRUE(same_bits(same.lse, outputs.lse));
    const DenseLossGradients gradients = backward(spoilt, outputs.lse, deterministic(execution));
    expect_same_bits(gradients, expected);
    EXPECT_TRUE(same_bits(part(gradients.d_index_k, 0, d.index_dim),
                          as_stored(DType::f32, part(d.d_index_k_before, 0, d.index_dim))));
  });
}

// Many rows of many heads load Q at the same time, whose place in shared memory keys take next.
TEST(DenseIndexLoss, OnCudaManyRowsHaveTheLseOfTheCpuBackend) {
  if (!has_cuda()) GTEST_SKIP();
  for (const std::int64_t qk_dim : {576, 512}) {
    SCOPED_TRACE(qk_dim);
    const DenseLoss d = filled({.tokens = 300,
                                .keys = 300,
                                .index_keys = 300,
                                .key_offset = 0,
                                .heads = 64,
                                .qk_dim = qk_dim,
                                .index_heads = 2,
                                .index_dim = 128,
                                .scale = 0.0625F},
                               9);
    expect_close(d, forward(d, on(Backend::cuda)), forward(d, on(Backend::cpu)));
  }
}

TEST(DenseIndexLoss, RowsDoNotDependOnTheirNeighbours) {
  on_each_loss(4, [](const Execution& execution, const DenseLoss& d) {
    const DenseLossOutputs together = forward(d, execution);
    const DenseLossGradients gradients = backward(d, together.lse, execution);
    for (std::int64_t t = 0; t < d.tokens; ++t) {
      const DenseLoss row = rows_of(d, t, 1);
      const DenseLossOutputs alone = forward(row, execution);
      EXPECT_TRUE(same_bits(alone.loss, part(together.loss, t, 1)));
      EXPECT_TRUE(same_bits(alone.lse, part(together.lse, t * d.heads, d.heads)));
      const DenseLossGradients of_row = backward(row, alone.lse, execution);
      const std::int64_t width = d.index_heads * d.index_dim;
      EXPECT_TRUE(same_bits(of_row.d_index_q, part(gradients.d_index_q, t * width, width)));
      EXPECT_TRUE(
          same_bits(of_row.d_weights, part(gradients.d_weights, t * d.index_heads, d.index_heads)));
    }
  });
}

TEST(DenseIndexLoss, DIndexKOfTheAccumulationTypeIsAddedToAndOthersOverwritten) {
  on_each_loss(5, [](const Execution& execution, const DenseLoss& whole) {
    DenseLoss d = whole;
    const Values lse = forward(d, execution).lse;
    const DenseLossGradients alone = backward(d, lse, execution);
    d.d_index_k_before = normals(static_cast<std::int64_t>(d.index_k.size()), 5, "d_index_k");
    DenseLossGradients sum = alone;
    for (std::size_t i = 0; i < sum.d_index_k.size(); ++i)
      sum.d_index_k[i] += d.d_index_k_before[i];
    EXPECT_TRUE(ok(compare("d_index_k", backward(d, lse, execution).d_index_k, sum.d_index_k,
                           harness::gradient_limit(DType::f32))));
    if (d.dtype == DType::f32) return;
    d.d_index_k_type = d.dtype;
    expect_close(d, backward(d, lse, execution), alone);
  });
}

TEST(DenseIndexLoss, ThreadsRepeatsAndTheWorkspaceLimitChangeNoBit) {
  on_each_loss(6, [](const Execution& usual, const DenseLoss& d) {
    Execution execution = deterministic(usual);
    const DenseLossOutputs outputs = forward(d, execution);
    const DenseLossGradients gradients = backward(d, outputs.lse, execution);
    for (const int threads : {0, 1, 2, 5}) {
      const Execution others = on_threads(threads, execution);
      EXPECT_TRUE(same_bits(forward(d, others).loss, outputs.loss));
      expect_same_bits(backward(d, outputs.lse, others), gradients);
    }
    const DenseLossWork work(d, harness::device_of(execution.backend));
    for (std::size_t limit = 1; limit <= std::size_t{1} << 28; limit *= 16) {
      execution.workspace_limit = limit;
      const std::string reason = why_not(work.forward, execution);
      const std::string backward_reason = why_not(work.backward, execution);
      if (reason.empty()) {
        EXPECT_LE(workspace_bytes(work.forward, execution), limit);
        EXPECT_TRUE(same_bits(forward(d, execution).loss, outputs.loss));
      } else {
        EXPECT_NE(reason.find("workspace_limit"), std::string::npos) << reason;
      }
      if (backward_reason.empty()) {
        EXPECT_LE(workspace_bytes(work.backward, execution), limit);
        expect_close(d, backward(d, outputs.lse, execution), gradients);
      } else {
        EXPECT_NE(backward_reason.find("workspace_limit"), std::string::npos) << backward_reason;
      }
    }
  });
}

TEST(DenseIndexLoss, IsLinearInDLoss) {
  on_each_loss_kernel([](const Execution& execution) {
    DenseLoss d = filled(DenseLoss{.dtype = DType::f32}, 7);
    const Values lse = forward(d, execution).lse;
    DenseLossGradients expected = backward(d, lse, execution);
    for (Values* values : {&expected.d_index_q, &expected.d_weights, &expected.d_index_k})
      for (double& value : *values) value *= -3;
    for (double& value : d.d_loss) value *= -3;
    expect_close(d, backward(d, lse, execution), expected);
  });
}

TEST(DenseIndexLoss, OfStridedTensorsIsTheSame) {
  on_each_loss(8, [](const Execution& execution, const DenseLoss& d) {
    const DenseLossOutputs outputs = forward(d, execution);
    const DenseLossGradients gradients = backward(d, outputs.lse, execution);
    for (const std::int64_t padding : {3, 8}) {
      DenseLoss strided = d;
      strided.row_padding = padding;
      expect_close(d, forward(strided, execution), outputs);
      expect_close(d, backward(strided, outputs.lse, execution), gradients);
    }
  });
}

// Rows of index_q begin at 16-byte boundaries only where they are looked at one by one, and rows
// are computed 1024 at a time: the last row must not get another kernel than the first.
TEST(DenseIndexLoss, ARowsGradientsDoNotDependOnItsPlace) {
  on_each_loss_kernel([](const Execution& execution) {
    const std::int64_t last = execution.backend == Backend::reference ? 8 : 1024;
    DenseLoss d = filled({.tokens = last + 1,
                          .keys = 40,
                          .index_keys = 40,
                          .key_offset = 0,
                          .heads = 1,
                          .index_heads = 1},
                         14);
    d.begin.assign(d.begin.size(), 0);
    d.end.assign(d.end.size(), 40);
    const auto repeat_first_row = [&](Values& values) {
      const auto width = static_cast<std::ptrdiff_t>(values.size()) / d.tokens;
      std::copy_n(values.begin(), width, values.end() - width);
    };
    for (Values* values : {&d.q, &d.index_q, &d.weights, &d.d_loss}) repeat_first_row(*values);
    const Device device = harness::device_of(execution.backend);
    DenseLossWork work(d, device);
    const Shape shape = {d.tokens, d.index_heads, d.index_dim};
    const Buffer index_q = floats(device, d.dtype, shape, d.index_q, /*row_padding=*/3);
    work.forward.index_q = work.backward.index_q = index_q.tensor();
    run_where_taken(work.forward, execution);
    run_where_taken(work.backward, execution);
    const DenseLossGradients gradients = work.gradients();
    EXPECT_TRUE(same_bits(part(gradients.d_index_q, 0, d.index_dim),
                          part(gradients.d_index_q, last * d.index_dim, d.index_dim)));
    EXPECT_TRUE(same_bits(part(gradients.d_weights, 0, 1), part(gradients.d_weights, last, 1)));
  });
}

TEST(DenseIndexLoss, AHundredRunsGiveTheSameBits) {
  on_each_loss_kernel([](const Execution& usual) {
    if (usual.backend == Backend::reference) return;  // sums in one order
    const DenseLoss d = filled({.tokens = 16,
                                .keys = 300,
                                .index_keys = 300,
                                .key_offset = 0,
                                .heads = 16,
                                .qk_dim = 576,
                                .index_heads = 32,
                                .index_dim = 128,
                                .scale = 0.0625F},
                               15);
    const Execution execution = deterministic(usual);
    const DenseLossOutputs outputs = forward(d, execution);
    const DenseLossGradients gradients = backward(d, outputs.lse, execution);
    for (int run = 1; run < 100; ++run) {
      const DenseLossOutputs again = forward(d, execution);
      ASSERT_TRUE(same_bits(again.loss, outputs.loss)) << "run " << run;
      ASSERT_TRUE(same_bits(again.lse, outputs.lse)) << "run " << run;
      expect_same_bits(backward(d, outputs.lse, execution), gradients);
    }
  });
}

// Pairs are added in another order: else nothing would show which of the two kernels ran.
TEST(DenseIndexLoss, OfPairsOfBf16DiffersFromThatOfFloatsInLastBits) {
  const Execution pairs{.backend = Backend::cpu, .kernel = "avx512_bf16"};
  const Execution floats_alone{.backend = Backend::cpu, .kernel = "simd"};
  const DenseLoss d = filled({.tokens = 20,
                              .keys = 300,
                              .index_keys = 300,
                              .key_offset = 0,
                              .heads = 16,
                              .qk_dim = 576,
                              .index_heads = 32,
                              .index_dim = 128,
                              .scale = 0.0625F},
                             16);
  const DenseLossWork work(d, {});
  if (!is_taken(work.forward, pairs)) GTEST_SKIP() << why_not(work.forward, pairs);
  const Values lse = forward(d, floats_alone).lse;
  EXPECT_FALSE(same_bits(forward(d, pairs).lse, lse));
  EXPECT_FALSE(
      same_bits(backward(d, lse, pairs).d_index_k, backward(d, lse, floats_alone).d_index_k));
  // The target of zeros is the same of both: what differs are scores.
  DenseLoss scores_alone = d;
  std::fill(scores_alone.q.begin(), scores_alone.q.end(), 0);
  const DenseLossOutputs outputs = forward(scores_alone, floats_alone);
  EXPECT_TRUE(same_bits(forward(scores_alone, pairs).lse, outputs.lse));
  EXPECT_FALSE(same_bits(forward(scores_alone, pairs).loss, outputs.loss));
}

/// Multiplies the values from `first` on by a power of two.
void scale_from(std::size_t first, Values& values, int exponent) {
  for (std::size_t i = first; i < values.size(); ++i) values[i] = std::ldexp(values[i], exponent);
}

TEST(DenseIndexLoss, CountsDenormals) {
  on_each_loss(17, [](const Execution& execution, const DenseLoss& whole) {
    if (whole.dtype != DType::bf16) return;
    // Of attention, then of the indexer: denormal keys or queries, or products of normal ones. The
    // second half of the keys may be larger, so that some blocks have none.
    for (const auto& [q, keys] : {std::pair{40, -130}, std::pair{-130, 40}, std::pair{-64, -62}}) {
      for (const int more : {0, 60}) {
        SCOPED_TRACE(fmt::format("q 2^{}, keys 2^{} and 2^{}", q, keys, keys + more));
        const int factor = -q - keys - more;
        DenseLoss attention = whole;
        scale_from(0, attention.q, q);
        scale_from(0, attention.kv, keys);
        scale_from(attention.kv.size() / 2, attention.kv, more);
        attention.scale = std::ldexp(attention.scale, factor);
        DenseLoss indexer = whole;
        scale_from(0, indexer.index_q, q);
        scale_from(0, indexer.index_k, keys);
        scale_from(indexer.index_k.size() / 2, indexer.index_k, more);
        scale_from(0, indexer.weights, factor);
        for (const DenseLoss& small : {attention, indexer})
          expect_close(small, forward(small, execution), forward(small, on(Backend::reference)));
      }
    }
  });
}

}  // namespace
}  // namespace winnow::tests
