// SPDX-License-Identifier: Apache-2.0
// Checks that every communicator must pass with any number of ranks. All ranks call a check at the
// same time, and each verifies its own results.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <numeric>

#include "harness/rank_step.h"
#include "tests/testing.h"

namespace winnow::tests {

/// Creates another communicator; called by all ranks together.
using MakeCommunicator =
    std::function<std::unique_ptr<Communicator>(std::chrono::milliseconds timeout)>;

inline constexpr Sharding kShardings[] = {Sharding::contiguous, Sharding::zigzag};

/// Shards as batches have them: uneven, with rows after the last document, with fewer rows than
/// ranks.
inline std::vector<Shards> some_shards(int ranks) {
  std::vector<Shards> shards;
  for (const Sharding sharding : kShardings) {
    shards.push_back(shard_rows(Ints{0, 13, 13, 50, 61}, 67, ranks, sharding));
    shards.push_back(shard_rows(Ints{0, 21, 64}, 64, ranks, sharding, 4));
    shards.push_back(shard_rows(Ints{0, 2}, 3, ranks, sharding));
    shards.push_back(shard_rows(Ints{0}, 0, ranks, sharding));
  }
  return shards;
}

inline std::int64_t rows_of_all(const Shards& shards) {
  std::int64_t rows = 0;
  for (const Ints& each : shards.rows) rows += static_cast<std::int64_t>(each.size());
  return rows;
}

/// The given rows of a matrix with `width` columns.
inline Values rows_of(const Values& values, const Ints& rows, std::int64_t width) {
  Values result;
  for (const std::int32_t row : rows) {
    const Values each = part(values, row * width, width);
    result.insert(result.end(), each.begin(), each.end());
  }
  return result;
}

inline void check_gathered_rows_stand_in_global_order(Communicator& ranks, Device device) {
  for (const Shards& shards : some_shards(ranks.size())) {
    const Ints& own = shards.rows[ranks.rank()];
    const auto own_rows = static_cast<std::int64_t>(own.size());
    const std::int64_t tokens = rows_of_all(shards);
    for (const DType dtype : {DType::bf16, DType::f32, DType::f8_e4m3, DType::f64}) {
      for (const std::int64_t padding : {0, 3}) {
        const Values all = as_stored(dtype, normals(tokens * 10, 7, "keys"));
        const Buffer shard = floats(device, dtype, {own_rows, 2, 5}, rows_of(all, own, 10), 0);
        const Buffer flat = floats(device, dtype, {own_rows, 10}, rows_of(all, own, 10), padding);
        const Buffer whole(device, dtype, {tokens, 2, 5});
        const Buffer padded(device, dtype, {tokens, 10}, padding);
        gather_keys(ranks, shard.tensor(), whole.tensor(), shards);
        gather_keys(ranks, flat.tensor(), padded.tensor(), shards);
        ranks.wait({});
        EXPECT_TRUE(same_bits(whole.download(), all));
        EXPECT_TRUE(same_bits(padded.download(), all));
        expect_canaries_intact(whole, padded);
      }
    }
    Ints rows(static_cast<std::size_t>(tokens));
    std::iota(rows.begin(), rows.end(), 0);
    const Buffer numbers = ints(device, {own_rows}, own);
    const Buffer gathered(device, DType::i32, {tokens});
    gather_keys(ranks, numbers.tensor(), gathered.tensor(), shards);
    EXPECT_EQ(gathered.download_ints(), rows);
  }
}

/// The loss of rank r is (r + 1) * sum(gathered), so with two ranks every gradient is 3.
inline void check_gradients_are_sums_over_ranks(Communicator& ranks, Device device) {
  const double sum = ranks.size() * (ranks.size() + 1) / 2.0;
  for (const Shards& shards : some_shards(ranks.size())) {
    const auto own = static_cast<std::int64_t>(shards.rows[ranks.rank()].size());
    const std::int64_t tokens = rows_of_all(shards);
    const Buffer whole =
        floats(device, DType::f32, {tokens, 6}, Values(tokens * 6, ranks.rank() + 1.0));
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
      const Buffer shard(device, dtype, {own, 6}, 2);
      scatter_key_grads(ranks, whole.tensor(), shard.tensor(), shards);
      ranks.wait({});
      EXPECT_TRUE(all_equal(shard.download(), sum));
      expect_canaries_intact(shard);
    }
  }
}

/// Every row arrives at its own rank, summed in fp32 and rounded once.
inline void check_gradients_are_rounded_once(Communicator& ranks, Device device) {
  for (const Shards& shards : some_shards(ranks.size())) {
    const Ints& own = shards.rows[ranks.rank()];
    const std::int64_t tokens = rows_of_all(shards);
    // 1 plus several 2^-9: exact in fp32, lost one by one in bf16.
    const auto part_of = [&](int rank) {
      Values values = whole_numbers(tokens * 8, rank, "gradients", 0, 3);
      for (double& value : values) value = (rank == 0 ? 1 : 0) + value * 0x1p-9;
      return values;
    };
    Values sum(static_cast<std::size_t>(tokens * 8), 0.0);
    for (int r = 0; r < ranks.size(); ++r) {
      const Values values = part_of(r);
      std::transform(sum.begin(), sum.end(), values.begin(), sum.begin(), std::plus<>());
    }
    const Values expected = rows_of(sum, own, 8);
    const Buffer whole = floats(device, DType::f32, {tokens, 8}, part_of(ranks.rank()));
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
      const Buffer shard(device, dtype, {static_cast<std::int64_t>(own.size()), 8});
      scatter_key_grads(ranks, whole.tensor(), shard.tensor(), shards);
      ranks.wait({});
      EXPECT_TRUE(same_bits(shard.download(), as_stored(dtype, expected)));
    }
  }
}

/// Results do not depend on who provides the memory, and a workspace that is too small is not used.
inline void check_workspaces(Communicator& ranks, Device device) {
  const Shards shards = shard_rows(Ints{0, 90}, 90, ranks.size(), Sharding::zigzag);
  const Ints& own = shards.rows[ranks.rank()];
  const auto own_rows = static_cast<std::int64_t>(own.size());
  const Values all = as_stored(DType::bf16, normals(90 * 4, 3, "keys"));
  const Buffer shard = floats(device, DType::bf16, {own_rows, 4}, rows_of(all, own, 4));
  for (const std::int64_t words : {8, 4096}) {
    const Buffer workspace(device, DType::i32, {words});
    const Buffer whole(device, DType::bf16, {90, 4});
    gather_keys(ranks, shard.tensor(), whole.tensor(), shards,
                {.workspace = workspace.tensor().data,
                 .workspace_bytes = static_cast<std::size_t>(words) * 4});
    EXPECT_TRUE(same_bits(whole.download(), all));
    EXPECT_TRUE(workspace.canaries_intact());
  }
}

inline void check_traffic(Communicator& ranks, Device device) {
  constexpr std::int32_t kRows = 131;  // more than one thread copies
  const Traffic before = ranks.traffic();
  const Shards shards = shard_rows(Ints{0, kRows}, kRows, ranks.size(), Sharding::zigzag);
  const auto own = static_cast<std::int64_t>(shards.rows[ranks.rank()].size());
  const Buffer shard = floats(device, DType::bf16, {own, 6}, Values(own * 6, 1.0));
  const Buffer whole(device, DType::bf16, {kRows, 6});
  gather_keys(ranks, shard.tensor(), whole.tensor(), shards);
  const Buffer gradients = floats(device, DType::f32, {kRows, 6}, Values(kRows * 6, 1.0));
  scatter_key_grads(ranks, gradients.tensor(), shard.tensor(), shards);
  EXPECT_EQ(ranks.traffic().gathered - before.gathered, (kRows - own) * 6 * 2);
  EXPECT_EQ(ranks.traffic().reduced - before.reduced, (kRows - own) * 6 * 4);
}

/// A layer of attention over documents with padding between them, with a number of rows that no
/// number of ranks divides.
struct LayerCase {
  harness::Case c;
  Ints offsets;
  Ints padded;
};
inline std::vector<LayerCase> layer_cases() {
  harness::Case glm = harness::find_case("glm-5.2-small");
  glm.rows = glm.tokens = 131;
  harness::Case flash = harness::find_case("deepseek-v4-flash-small");
  flash.rows = flash.tokens = 149;
  return {{glm, {0, 37, 37, 80, 113}, {0, 40, 40, 88, 128}},
          {glm, {0, 100, 131}, {}},
          {flash, {0, 50, 93, 130}, {0, 52, 100, 148}}};
}

/// Compares the step of N ranks with that of one: per-row results bitwise, sums over rows within
/// the error of fp32.
inline void check_many_ranks_equal_one(Communicator& ranks, Device device) {
  for (const LayerCase& layer : layer_cases()) {
    const harness::Batch batch(layer.c, layer.offsets, layer.padded, {});
    const harness::TrainingStep alone(layer.c, batch, {.device = device}, 1);
    alone.run({.threads = 1});
    for (const Sharding sharding : kShardings) {
      const ::testing::ScopedTrace trace(__FILE__, __LINE__,
                                         fmt::format("{}, {} rows, sharding {}", layer.c.name,
                                                     layer.c.rows, static_cast<int>(sharding)));
      harness::RankStep rank(layer.c, batch, sharding, ranks, 1, device);
      const Execution execution{.threads = 1};
      rank.gather(execution);
      rank.compute(execution);
      rank.scatter(execution);
      rank.sum_parameters(execution);
      ranks.wait(execution);
      const auto expected = harness::results_alone(alone);
      const auto actual = harness::results_of(rank);
      ASSERT_EQ(actual.size(), expected.size());
      for (std::size_t i = 0; i < actual.size(); ++i) {
        const harness::Rows rows = rows_of_rank(expected[i], rank.shards, ranks.rank());
        EXPECT_TRUE(ok(compare_with_one_rank(expected[i], values_of(*actual[i].buffer),
                                             values_of(*expected[i].buffer, rows))));
      }
      EXPECT_TRUE(rank.own.canaries_intact() && rank.step.buffers.canaries_intact());
    }
  }
}

/// The heads of rank r of `ranks` of a tensor whose dimension `dim` is heads.
inline Tensor heads_of(Tensor tensor, int dim, const Communicator& ranks) {
  if (!tensor) return tensor;
  const std::int64_t heads = tensor.shape[dim];
  const std::int64_t first = heads * ranks.rank() / ranks.size();
  tensor.data = static_cast<std::byte*>(tensor.data) +
                first * tensor.stride[dim] * element_bytes(tensor.dtype);
  tensor.shape[dim] = heads * (ranks.rank() + 1) / ranks.size() - first;
  return tensor;
}

/// Sums a contiguous f32 matrix over ranks, in place.
inline void all_reduce(Communicator& ranks, const Tensor& sums) {
  std::vector<std::int64_t> rows;
  for (int r = 0; r < ranks.size(); ++r)
    rows.push_back(sums.shape[0] * (r + 1) / ranks.size() - sums.shape[0] * r / ranks.size());
  const Buffer shard(sums.device, DType::f32, {rows[ranks.rank()], sums.shape[1]});
  ranks.reduce_scatter(sums, shard.tensor(), rows, {});
  ranks.all_gather(shard.tensor(), sums, rows, {});
}

/// The indexer's step with queries split over `rows` and heads of attention over `heads` against
/// that of one rank. Targets are summed over heads before the divergence; its sums and counts, and
/// the gradients of keys, over rows after it.
inline void check_rows_and_heads_together_equal_one(Communicator& rows, Communicator& heads) {
  const Execution execution{.threads = 1};
  for (const LayerCase& layer : layer_cases()) {
    SCOPED_TRACE(layer.c.name);
    const harness::Batch batch(layer.c, layer.offsets, layer.padded, {});
    const harness::TrainingStep alone(layer.c, batch, {}, 1);
    alone.run(execution);

    harness::RankStep rank(layer.c, batch, Sharding::zigzag, rows, 1);
    const harness::TrainingStep& step = rank.step;
    rank.gather(execution);
    run(step.windows, execution);
    run(step.select, execution);
    if (layer.c.window > 0) run(step.lists, execution);
    SparseAttentionForward attend = step.attend;
    IndexTarget find_target = step.find_target;
    attend.out = heads_of(attend.out, 1, heads);
    attend.q = find_target.q = heads_of(attend.q, 1, heads);
    attend.lse = find_target.lse = heads_of(attend.lse, 1, heads);
    attend.sink = find_target.sink = heads_of(attend.sink, 0, heads);
    run(attend, execution);
    run(find_target, execution);
    all_reduce(heads, step.target.tensor());
    run(step.find_loss, execution);
    run(step.select_backward, execution);
    rank.scatter_index_keys(execution);

    const harness::Rows own = harness::rows_of_rank({}, rank.shards, rows.rank());
    const auto expect = [&](const char* what, const Buffer& actual, const Buffer& expected,
                            harness::Limit limit) {
      EXPECT_TRUE(ok(compare(what, values_of(actual), values_of(expected, own), limit)));
    };
    const harness::Limit gradients = harness::gradient_limit(layer.c.dtype);
    expect("target", step.target, alone.target, harness::target_limit(DType::f32));
    expect("d_scores", step.d_scores, alone.d_scores, harness::loss_gradient_limit());
    expect("d_index_q", step.d_index_q, alone.d_index_q, gradients);
    expect("d_weights", step.d_weights, alone.d_weights, gradients);
    const harness::StepOutput keys{
        "d_index_k", &alone.d_index_k,
        layer.c.has_pools() ? harness::RowKind::pools : harness::RowKind::rows};
    EXPECT_TRUE(ok(
        compare("d_index_k", values_of(rank.d_index_k),
                values_of(alone.d_index_k, harness::rows_of_rank(keys, rank.shards, rows.rank())),
                gradients)));

    const auto sum_and_count = [](const Buffer& loss) {
      Values result(2, 0.0);
      for (const double value : loss.download()) {
        result[0] += value;
        result[1] += value > 0 ? 1 : 0;
      }
      return result;
    };
    const Buffer sums = floats({}, DType::f32, {1, 2}, sum_and_count(step.loss));
    all_reduce(rows, sums.tensor());
    EXPECT_TRUE(ok(compare("sum and count of losses", sums.download(), sum_and_count(alone.loss),
                           harness::loss_limit(DType::f32))));
  }
}

/// The message with which a collective fails; empty if it succeeds.
template <class Call>
std::string communication_failure(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::communication) << error.what();
    return error.what();
  }
  return {};
}

/// Ranks find out if they disagree on which rows each has, with equal counts, and if one rank was
/// refused a call.
inline void check_histories_are_compared(const MakeCommunicator& make) {
  const auto gather = [](Communicator& ranks, Sharding sharding, std::int64_t more_rows) {
    const std::int32_t tokens = 4 * ranks.size();
    const Shards shards = shard_rows(Ints{0, tokens}, tokens, ranks.size(), sharding);
    const Buffer shard({}, DType::f32, {4, 3});
    const Buffer whole({}, DType::f32, {tokens + more_rows, 3});
    gather_keys(ranks, shard.tensor(), whole.tensor(), shards);
  };
  {
    const std::unique_ptr<Communicator> ranks = make(std::chrono::seconds(20));
    if (ranks->size() == 1) return;
    const bool is_last = ranks->rank() == ranks->size() - 1;
    EXPECT_NE(communication_failure(
                  [&] { gather(*ranks, is_last ? Sharding::zigzag : Sharding::contiguous, 0); }),
              "");
  }
  {
    const std::unique_ptr<Communicator> ranks = make(std::chrono::seconds(20));
    if (ranks->rank() == 0) {
      EXPECT_NE(refusal_of([&] { gather(*ranks, Sharding::zigzag, 1); }), "");
    }
    EXPECT_NE(communication_failure([&] { gather(*ranks, Sharding::zigzag, 0); }), "");
  }
}

inline void check_mismatches_are_errors_on_every_rank(const MakeCommunicator& make) {
  const auto gather = [](Communicator& ranks, DType dtype, std::int64_t width, std::int64_t rows) {
    const std::vector<std::int64_t> all(static_cast<std::size_t>(ranks.size()), rows);
    const Buffer shard({}, dtype, {rows, width});
    const Buffer whole({}, dtype, {rows * ranks.size(), width});
    ranks.all_gather(shard.tensor(), whole.tensor(), all, {});
  };
  const auto reduce = [](Communicator& ranks) {
    const std::vector<std::int64_t> all(static_cast<std::size_t>(ranks.size()), 4);
    const Buffer shard({}, DType::f32, {4, 8});
    const Buffer whole({}, DType::f32, {4 * ranks.size(), 8});
    ranks.reduce_scatter(whole.tensor(), shard.tensor(), all, {});
  };
  const auto other_split = [](Communicator& ranks) {
    std::vector<std::int64_t> all(static_cast<std::size_t>(ranks.size()), 4);
    all.front() = 3;
    all.back() = 5;
    const Buffer shard({}, DType::f32, {5, 8});
    const Buffer whole({}, DType::f32, {4 * ranks.size(), 8});
    ranks.all_gather(shard.tensor(), whole.tensor(), all, {});
  };
  const std::vector<std::function<void(Communicator&)>> others{
      [&](Communicator& ranks) { gather(ranks, DType::f32, 9, 4); },
      [&](Communicator& ranks) { gather(ranks, DType::bf16, 8, 4); },
      [&](Communicator& ranks) { gather(ranks, DType::f32, 8, 5); }, reduce, other_split};
  for (const auto& other : others) {
    const std::unique_ptr<Communicator> ranks = make(std::chrono::seconds(20));
    if (ranks->size() == 1) return;
    gather(*ranks, DType::f32, 8, 4);
    const bool is_last = ranks->rank() == ranks->size() - 1;
    const std::string text =
        communication_failure([&] { is_last ? other(*ranks) : gather(*ranks, DType::f32, 8, 4); });
    const int last = ranks->size() - 1;
    EXPECT_TRUE(text.starts_with(fmt::format("rank {} calls ", last)) ||
                text.find(fmt::format("ranks 0 and {} ", last)) != std::string::npos)
        << text;
    EXPECT_NE(communication_failure([&] { gather(*ranks, DType::f32, 8, 4); }), "");
  }
}

/// Ranks that wait for a missing rank get an Error within the time-out.
inline void check_a_missing_rank_is_an_error(const MakeCommunicator& make) {
  constexpr std::chrono::milliseconds kTimeout{400};
  const std::unique_ptr<Communicator> ranks = make(kTimeout);
  if (ranks->rank() == ranks->size() - 1) return;
  const Shards shards = shard_rows(Ints{0, 64}, 64, ranks->size(), Sharding::zigzag);
  const auto own = static_cast<std::int64_t>(shards.rows[ranks->rank()].size());
  const Buffer shard = floats({}, DType::f32, {own, 8}, Values(own * 8, 1.0));
  const Buffer whole({}, DType::f32, {64, 8});
  const auto start = std::chrono::steady_clock::now();
  const std::string text =
      communication_failure([&] { gather_keys(*ranks, shard.tensor(), whole.tensor(), shards); });
  const auto waited = std::chrono::steady_clock::now() - start;
  EXPECT_NE(text.find("time-out"), std::string::npos) << text;
  EXPECT_LT(waited, 10 * kTimeout);
}

}  // namespace winnow::tests
