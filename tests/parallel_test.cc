// SPDX-License-Identifier: Apache-2.0
// Context parallel with ranks as threads: gathering and scattering, steps of many ranks against
// one, failures, refusals.
#include <mutex>

#include "harness/local_communicator.h"
#include "tests/rank_checks.h"
#include "tests/resident_memory.h"

namespace winnow::tests {
namespace {

using harness::on_local_ranks;

/// Calls check(communicator, device) on every rank of groups of many sizes.
void on_groups(const std::function<void(Communicator&, Device)>& check) {
  for (const int ranks : {1, 2, 3, 4, 8}) {
    const ::testing::ScopedTrace trace(__FILE__, __LINE__, fmt::format("{} ranks", ranks));
    on_local_ranks(ranks, [&](Communicator& communicator) { check(communicator, {}); });
  }
}

/// Creates groups on demand: the k-th communicator of every rank belongs to the k-th group.
class Groups {
 public:
  explicit Groups(int ranks) : ranks_(ranks), made_(static_cast<std::size_t>(ranks), 0) {}

  std::unique_ptr<Communicator> make(int rank, std::chrono::milliseconds timeout) {
    const std::lock_guard lock(mutex_);
    const std::size_t k = made_[rank]++;
    if (k == groups_.size()) groups_.push_back(harness::local_communicators(ranks_, timeout));
    return std::move(groups_[k][rank]);
  }

 private:
  int ranks_;
  std::mutex mutex_;
  std::vector<std::size_t> made_;  // number created by each rank
  std::vector<std::vector<std::unique_ptr<Communicator>>> groups_;
};

void on_groups_that_fail(const std::function<void(const MakeCommunicator&)>& check) {
  for (const int ranks : {1, 2, 3, 4}) {
    Groups groups(ranks);
    on_local_ranks(ranks, [&](Communicator& communicator) {
      check([&](std::chrono::milliseconds timeout) {
        return groups.make(communicator.rank(), timeout);
      });
    });
  }
}

TEST(Parallel, GatheredRowsStandInGlobalOrder) {
  on_groups(check_gathered_rows_stand_in_global_order);
}

TEST(Parallel, GradientsAreSumsOverRanks) { on_groups(check_gradients_are_sums_over_ranks); }

TEST(Parallel, GradientsAreRoundedOnce) { on_groups(check_gradients_are_rounded_once); }

TEST(Parallel, WorkspacesDoNotMatter) { on_groups(check_workspaces); }

TEST(Parallel, TrafficCountsWhatOtherRanksHave) { on_groups(check_traffic); }

TEST(Parallel, ManyRanksEqualOne) { on_groups(check_many_ranks_equal_one); }

TEST(Parallel, RowsAndHeadsTogetherEqualOne) {
  using Pairs = std::vector<std::vector<std::unique_ptr<Communicator>>>;
  Pairs rows, heads;
  for (int pair = 0; pair < 2; ++pair) {
    rows.push_back(harness::local_communicators(2));
    heads.push_back(harness::local_communicators(2));
  }
  on_local_ranks(4, [&](Communicator& all) {
    const int row = all.rank() / 2;
    const int head = all.rank() % 2;
    check_rows_and_heads_together_equal_one(*rows[head][row], *heads[row][head]);
  });
}

TEST(Parallel, MismatchesAreErrorsOnEveryRank) {
  on_groups_that_fail(check_mismatches_are_errors_on_every_rank);
}

TEST(Parallel, HistoriesAreCompared) { on_groups_that_fail(check_histories_are_compared); }

TEST(Parallel, AMissingRankIsAnError) { on_groups_that_fail(check_a_missing_rank_is_an_error); }

TEST(Parallel, CommunicatorsKeepNoMemory) {
  expect_no_growth(3000, [] {
    on_local_ranks(2, [](Communicator& communicator) { check_traffic(communicator, {}); });
  });
}

class ParallelRefusals : public ::testing::Test {
 protected:
  ParallelRefusals() : communicators_(harness::local_communicators(2)) {}

  /// The error of rank 0 of two.
  std::string gather(const Tensor& shard, const Tensor& whole, const Shards& shards) {
    return refusal_of([&] { gather_keys(*communicators_[0], shard, whole, shards); });
  }
  std::string scatter(const Tensor& whole, const Tensor& shard, const Shards& shards) {
    return refusal_of([&] { scatter_key_grads(*communicators_[0], whole, shard, shards); });
  }

  const Shards shards_{{{0, 3}, {1, 2}}};
  const Buffer shard_{{}, DType::bf16, {2, 4}};
  const Buffer whole_{{}, DType::bf16, {4, 4}};
  const Buffer sums_{{}, DType::f32, {4, 4}};

 private:
  std::vector<std::unique_ptr<Communicator>> communicators_;
};

TEST_F(ParallelRefusals, OfShards) {
  const auto refused = [&](const Shards& shards) {
    return gather(shard_.tensor(), whole_.tensor(), shards);
  };
  EXPECT_EQ(refused({{{0, 1}, {2, 3}, {}}}),
            "gather_keys: shards.rows [3]: ranks must be 2, as in communicator");
  EXPECT_EQ(refused({{{0, 3}, {1, -2}}}), "gather_keys: shards.rows[1][1] -2: must be at least 0");
  EXPECT_EQ(refused({{{0, 4}, {1, 2}}}), "gather_keys: shards.rows[0][1] 4: must be at most 3");
  EXPECT_EQ(refused({{{0, 3}, {1, 3}}}),
            "gather_keys: shards.rows[1][1] 3: must be a row that stands once");
  EXPECT_EQ(refused({{{0, 3, 4}, {1, 2}}}),
            "gather_keys: whole bf16[4, 4]: rows must be 5, as in shards");
  EXPECT_EQ(refused({{{0}, {1, 2, 3}}}),
            "gather_keys: shard bf16[2, 4]: rows must be 1, as in shards.rows[0]");
}

TEST_F(ParallelRefusals, OfTensors) {
  const Buffer narrow({}, DType::bf16, {4, 3});
  const Buffer half({}, DType::f16, {4, 4});
  EXPECT_EQ(gather({}, whole_.tensor(), shards_), "gather_keys: shard absent: must be given");
  EXPECT_EQ(gather(shard_.tensor(), narrow.tensor(), shards_),
            "gather_keys: whole bf16[4, 3]: must be bf16[4, 4]");
  EXPECT_EQ(gather(shard_.tensor(), half.tensor(), shards_),
            "gather_keys: whole f16[4, 4]: dtype must be bf16");
  EXPECT_EQ(scatter(whole_.tensor(), shard_.tensor(), shards_),
            "scatter_key_grads: whole bf16[4, 4]: dtype must be f32");
  const Buffer doubles({}, DType::f64, {2, 4});
  EXPECT_EQ(scatter(sums_.tensor(), doubles.tensor(), shards_),
            "scatter_key_grads: shard f64[2, 4]: dtype must be bf16, f16 or f32");
  Tensor elsewhere = whole_.tensor();
  elsewhere.device = {DeviceKind::cuda, 0};
  EXPECT_EQ(gather(shard_.tensor(), elsewhere, shards_),
            "gather_keys: whole cuda:0 bf16[4, 4]: must be on cpu, as shard");
  Tensor transposed = sums_.tensor();
  std::swap(transposed.stride[0], transposed.stride[1]);
  EXPECT_EQ(scatter(transposed, shard_.tensor(), shards_),
            "scatter_key_grads: whole f32[4, 4]: must be contiguous behind the first dimension");
  Tensor scalar = whole_.tensor();
  scalar.rank = 0;
  EXPECT_EQ(gather(scalar, whole_.tensor(), shards_),
            "gather_keys: shard bf16[]: must have 1 to 4 dimensions, [rows, ...]");
}

TEST(Parallel, ShapesBehindTheRankMeanNothing) {
  const Shards all{{{0, 1}}};
  const Buffer keys = floats({}, DType::f32, {2, 3}, normals(6, 1, "keys"));
  const Buffer gathered({}, DType::f32, {2, 3});
  Tensor whole = gathered.tensor();
  whole.shape[2] = 7;
  gather_keys(*harness::local_communicators(1)[0], keys.tensor(), whole, all);
  EXPECT_TRUE(same_bits(gathered.download(), keys.download()));
}

TEST(Parallel, NcclRefusesWhatIsNoCommunicator) {
  EXPECT_NE(refusal_of([] { nccl_communicator(nullptr); }), "");
}

}  // namespace
}  // namespace winnow::tests
