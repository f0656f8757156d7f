// SPDX-License-Identifier: Apache-2.0
// One rank of an MPI job: the checks that every communicator must pass. mpi_test starts it.
#include <mpi.h>

#include "tests/failing_allocations.h"
#include "tests/rank_checks.h"
#include "tests/resident_memory.h"
#include "winnow/mpi.h"

namespace winnow::tests {
namespace {

std::unique_ptr<Communicator> make(std::chrono::milliseconds timeout) {
  const MPI_Comm world = MPI_COMM_WORLD;
  return mpi_communicator(&world, timeout);
}

/// One communicator, shared by all checks that do not break it.
class Mpi : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { ranks_ = make(std::chrono::seconds(20)); }
  static void TearDownTestSuite() { ranks_.reset(); }

  static inline std::unique_ptr<Communicator> ranks_;
};

TEST_F(Mpi, KnowsItsRank) {
  int rank = -1;
  int size = -1;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  EXPECT_EQ(ranks_->rank(), rank);
  EXPECT_EQ(ranks_->size(), size);
}

TEST_F(Mpi, GatheredRowsStandInGlobalOrder) {
  check_gathered_rows_stand_in_global_order(*ranks_, {});
}

TEST_F(Mpi, GradientsAreSumsOverRanks) { check_gradients_are_sums_over_ranks(*ranks_, {}); }

TEST_F(Mpi, GradientsAreRoundedOnce) { check_gradients_are_rounded_once(*ranks_, {}); }

TEST_F(Mpi, WorkspacesDoNotMatter) { check_workspaces(*ranks_, {}); }

TEST_F(Mpi, TrafficCountsWhatOtherRanksHave) { check_traffic(*ranks_, {}); }

TEST_F(Mpi, ManyRanksEqualOne) { check_many_ranks_equal_one(*ranks_, {}); }

TEST_F(Mpi, RowsAndHeadsTogetherEqualOne) {
  if (ranks_->size() != 4) GTEST_SKIP() << "two ranks for rows times two for heads";
  MPI_Comm rows{};
  MPI_Comm heads{};
  MPI_Comm_split(MPI_COMM_WORLD, ranks_->rank() % 2, ranks_->rank(), &rows);
  MPI_Comm_split(MPI_COMM_WORLD, ranks_->rank() / 2, ranks_->rank(), &heads);
  check_rows_and_heads_together_equal_one(*mpi_communicator(&rows), *mpi_communicator(&heads));
  MPI_Comm_free(&rows);
  MPI_Comm_free(&heads);
}

// Several messages of 1 MB each: above the eager limit of MPI.
TEST_F(Mpi, LargeRowsArriveWhole) {
  const Shards shards = shard_rows(Ints{0, 150, 515}, 515, ranks_->size(), Sharding::zigzag);
  const Ints& own = shards.rows[ranks_->rank()];
  const auto own_rows = static_cast<std::int64_t>(own.size());
  constexpr std::int64_t kWidth = 2048;
  const Values all = whole_numbers(515 * kWidth, 5, "large", -100, 100);
  const Buffer shard = floats({}, DType::f32, {own_rows, kWidth}, rows_of(all, own, kWidth));
  const Buffer whole({}, DType::f32, {515, kWidth});
  gather_keys(*ranks_, shard.tensor(), whole.tensor(), shards);
  EXPECT_TRUE(same_bits(whole.download(), all));
  const Buffer sum({}, DType::f32, {own_rows, kWidth});
  scatter_key_grads(*ranks_, whole.tensor(), sum.tensor(), shards);
  Values expected = rows_of(all, own, kWidth);
  for (double& value : expected) value *= ranks_->size();
  EXPECT_EQ(sum.download(), expected);  // +0 equals -0
}

TEST_F(Mpi, CudaTensorsGoThroughHostMemory) {
  if (const std::string reason = why_not(Backend::cuda); !reason.empty()) GTEST_SKIP() << reason;
  const Device device{DeviceKind::cuda, 0};  // shared by all ranks
  check_gathered_rows_stand_in_global_order(*ranks_, device);
  check_gradients_are_sums_over_ranks(*ranks_, device);
  check_gradients_are_rounded_once(*ranks_, device);
  check_workspaces(*ranks_, device);
  check_many_ranks_equal_one(*ranks_, device);
}

TEST_F(Mpi, ArgumentsAreRefusedByName) {
  const std::vector<std::int64_t> rows(static_cast<std::size_t>(ranks_->size()), 2);
  const Buffer shard({}, DType::bf16, {2, 4});
  const Buffer whole({}, DType::bf16, {2 * ranks_->size() + 1, 4});
  EXPECT_EQ(refusal_of([&] { ranks_->all_gather(shard.tensor(), whole.tensor(), rows, {}); }),
            fmt::format("all_gather: whole {}: rows must be {}, as in rows",
                        describe(whole.tensor()), 2 * ranks_->size()));
  EXPECT_EQ(refusal_of([&] { ranks_->reduce_scatter(whole.tensor(), shard.tensor(), rows, {}); }),
            "reduce_scatter: shard bf16[2, 4]: dtype must be f32");
  EXPECT_EQ(refusal_of([&] {
              ranks_->all_gather(shard.tensor(), whole.tensor(), std::span(rows).first(0), {});
            }),
            fmt::format("all_gather: rows [0]: ranks must be {}, as in the communicator",
                        ranks_->size()));
  // All ranks were refused, so that none waits, and the communicator remains usable.
  check_traffic(*ranks_, {});
}

// Fewer repeats than elsewhere, since MPI takes tens of milliseconds to make a communicator; still
// enough to see the few kilobytes that a call on several threads could keep.
TEST(SlowMpi, CommunicatorsKeepNoMemory) {
  expect_no_growth(300, [] { check_traffic(*make(std::chrono::seconds(20)), {}); });
}

TEST(MpiFailures, RunningOutOfMemoryIsAnErrorAndBreaksTheCommunicator) {
  constexpr std::chrono::seconds kTimeout{1};
  if (make(kTimeout)->size() > 1) GTEST_SKIP() << "other ranks would wait";
  EXPECT_GT(fail_each_allocation([&] { make(kTimeout); }), 0);
  const std::int64_t rows[] = {3};
  const Buffer shard = floats({}, DType::f32, {3, 2}, normals(6, 1, "shard"));
  const Buffer whole({}, DType::f32, {3, 2});
  const auto expect_broken = [&](const char* name, const auto& collective) {
    all_after_fail = true;
    std::int64_t n = 0;
    for (failed = 1; failed > 0; ++n) {
      const auto ranks = make(kTimeout);
      const Outcome outcome = outcome_of([&] { collective(*ranks); }, n);
      EXPECT_EQ(outcome, failed > 0 ? Outcome::out_of_memory : Outcome::done);
      EXPECT_EQ(refusal_of([&] { ranks->wait({}); }),
                failed > 0 ? "the communicator is broken since out of host memory" : "");
    }
    EXPECT_GT(n, 1) << name << " allocated nothing";
  };
  expect_broken("all_gather", [&](Communicator& ranks) {
    ranks.all_gather(shard.tensor(), whole.tensor(), rows, {});
  });
  expect_broken("reduce_scatter", [&](Communicator& ranks) {
    ranks.reduce_scatter(whole.tensor(), shard.tensor(), rows, {});
  });
  expect_canaries_intact(shard, whole);
}

TEST(MpiFailures, MismatchesAreErrorsOnEveryRank) {
  check_mismatches_are_errors_on_every_rank(make);
}

TEST(MpiFailures, HistoriesAreCompared) { check_histories_are_compared(make); }

TEST(MpiFailures, AMissingRankIsAnError) { check_a_missing_rank_is_an_error(make); }

}  // namespace
}  // namespace winnow::tests

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  using winnow::tests::make;
  const std::string early = winnow::tests::refusal_of([] { make(std::chrono::seconds(1)); });
  MPI_Init(&argc, &argv);
  // Destroyed after MPI_Finalize: it must not call MPI then.
  const auto survivor = make(std::chrono::seconds(20));
  int result = RUN_ALL_TESTS();
  MPI_Finalize();
  const std::string late = winnow::tests::refusal_of([] { make(std::chrono::seconds(1)); });
  // Before MPI_Init and after MPI_Finalize no communicator can be created.
  if (early.empty() || late.empty()) result = 1;
  return result;
}
