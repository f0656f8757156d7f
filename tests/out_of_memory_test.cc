// SPDX-License-Identifier: Apache-2.0
// Host memory that runs out at any allocation is an Error(out_of_memory): nothing is kept, nothing
// beside the outputs is written, and the next call works.
#include <atomic>
#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

#include "core/memory_errors.h"
#include "core/threads.h"
#include "harness/local_communicator.h"
#include "tests/call_bits.h"
#include "tests/failing_allocations.h"
#include "tests/random_calls.h"

namespace winnow::tests {
namespace {

TEST(OutOfMemory, InACallIsAnErrorAndTheNextCallWorks) {
  constexpr std::uint64_t kSeeds = 3;
  for (const Backend backend : {Backend::cpu, Backend::reference}) {
    const Execution execution{.backend = backend, .threads = 2};
    for_each_operator([&]<class Args>(std::type_identity<Args>) {
      int caught = 0;
      for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
        SCOPED_TRACE(fmt::format("{}, {}, seed {}", name(backend), Args::kOperator, seed));
        Call call = CallMaker(seed, {}).make<Args>();
        const Bits before = output_bits(call);
        const Bits expected = bits_of_run(call, execution);
        caught += fail_each_allocation([&] { call.run(execution); }, Outcome::done,
                                       [&] { restore_outputs(call, before); });
        EXPECT_EQ(bits_of_run(call, execution), expected);
        const auto& args = *static_cast<const Args*>(call.args.get());
        caught += fail_each_allocation([&] { (void)workspace_bytes(args, execution); });
        caught += fail_each_allocation([&] { (void)why_not(args, execution); });
        caught += fail_each_allocation([&] { (void)explain(args, execution); });
        caught += fail_each_allocation([&] { (void)kernels<Args>(backend); });
        caught += fail_each_allocation([&] { run(args, {.threads = -1}); }, Outcome::refused);
      }
      EXPECT_GT(caught, 0) << "nothing was allocated";
    });
  }
}

TEST(OutOfMemory, NamesTheFunctionIfThereIsMemoryForIt) {
  const Call call = CallMaker(1, {}).make<SparseAttentionForward>();
  const auto text_of_error = [&](bool all_after) {
    all_after_fail = all_after;
    left = 0;
    try {
      call.run({});
    } catch (const Error& error) {
      left = kNever;
      return std::string(error.what());
    }
    left = kNever;
    return std::string();
  };
  EXPECT_EQ(text_of_error(false), "sparse_attention_forward: out of host memory");
  EXPECT_EQ(text_of_error(true), "out of host memory");
}

TEST(OutOfMemory, InFunctionsThatAreNoOperatorsIsAnErrorToo) {
  const Ints cu_seqlens = {0, 21, 64};
  for (const Sharding sharding : {Sharding::contiguous, Sharding::zigzag}) {
    EXPECT_GT(fail_each_allocation([&] { shard_rows(cu_seqlens, 67, 3, sharding); }), 0);
    EXPECT_GT(
        fail_each_allocation([&] { shard_rows(cu_seqlens, 3, 3, sharding); }, Outcome::refused), 0);
  }

  const std::vector<std::int64_t> lengths = {3, 2, 4, 1};
  const std::vector<std::int64_t> padded = {4, 2, 4, 2};
  const std::vector<std::int64_t> tokens(12, 7);
  const PaddedBatch batch{
      .documents = {.rows = 2, .row_tokens = 6, .seq_lens = lengths, .seq_lens_padded = padded},
      .input_ids = tokens,
      .labels = tokens,
      .position_ids = tokens};
  EXPECT_GT(fail_each_allocation([&] { thd_layout(batch.documents, 2); }), 0);
  EXPECT_GT(fail_each_allocation([&] { thd_batch(batch, 2); }), 0);
  const ThdBatch packed = thd_batch(batch, 2);
  const Ints rows = {0, 2, 5};
  EXPECT_GT(fail_each_allocation([&] { thd_shard(packed, 1, rows); }), 0);

  const Buffer wide({}, DType::bf16, {100, 200, 300});
  EXPECT_GT(fail_each_allocation([&] { (void)describe(wide.tensor()); }), 0);
  EXPECT_GT(fail_each_allocation(
                [] {
                  tensor(nullptr, DType::f32, {1, 1, 1, 1, 1});
                },
                Outcome::refused),
            0);
  EXPECT_GT(fail_each_allocation([] { dtype_from_dlpack(7, 7, 7); }, Outcome::refused), 0);
  EXPECT_GT(fail_each_allocation([] { device_from_dlpack(7, 0); }, Outcome::refused), 0);
  EXPECT_GT(fail_each_allocation([] { backend_from_name("abacus"); }, Outcome::refused), 0);
  EXPECT_GT(fail_each_allocation([] { (void)describe(Backend::cpu); }), 0);
  fail_each_allocation([] { (void)why_not(Backend::cuda); });
  EXPECT_GT(fail_each_allocation([] { nccl_communicator(nullptr); }, Outcome::refused), 0);
}

TEST(OutOfMemory, WhileKeysAreGatheredIsAnErrorToo) {
  const auto ranks = harness::local_communicators(1);
  const Shards reversed{{{3, 2, 1, 0}}};
  const Buffer shard = floats({}, DType::f32, {4, 5}, normals(20, 1, "shard"));
  const Buffer whole = floats({}, DType::f32, {4, 5}, normals(20, 2, "whole"));
  EXPECT_GT(fail_each_allocation(
                [&] { gather_keys(*ranks[0], shard.tensor(), whole.tensor(), reversed); }),
            0);
  EXPECT_GT(fail_each_allocation(
                [&] { scatter_key_grads(*ranks[0], whole.tensor(), shard.tensor(), reversed); }),
            0);
  expect_canaries_intact(shard, whole);
}

// No task of an operator allocates, but oneTBB may, and a task that did must not end the process.
TEST(OutOfMemory, OnAWorkerReachesTheCaller) {
  constexpr std::int64_t kTasks = 64;
  std::atomic<std::int64_t> sum = 0;
  const auto tasks = [&] {
    with_memory_errors("tasks", [&] {
      sum = 0;
      parallel_for({.threads = 2}, kTasks, 0, [&](std::int64_t i, Scratch) {
        const std::vector<std::int64_t> some(static_cast<std::size_t>(i + 1), i);
        sum += some.back();
      });
    });
  };
  EXPECT_GE(fail_each_allocation(tasks), kTasks);
  EXPECT_EQ(sum, kTasks * (kTasks - 1) / 2);
}

}  // namespace
}  // namespace winnow::tests
