// SPDX-License-Identifier: Apache-2.0
// Host memory that runs out at any allocation is an Error(out_of_memory): nothing is kept, nothing
// beside the outputs is written, and the next call works. This program replaces operator new.
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <new>
#include <string>
#include <type_traits>
#include <vector>

#include "core/memory_errors.h"
#include "core/threads.h"
#include "harness/local_communicator.h"
#include "tests/call_bits.h"
#include "tests/random_calls.h"

namespace {

constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();

std::atomic<std::int64_t> left = kNever;   // allocations that succeed before one fails
std::atomic<bool> all_after_fail = false;  // or that one alone
std::atomic<std::int64_t> failed = 0;
std::atomic<std::int64_t> live = 0;  // allocations that have not been freed

bool fails() {
  const std::int64_t before = left.fetch_sub(1);
  if (before > 0 || (before < 0 && !all_after_fail)) return false;
  ++failed;
  return true;
}

void* allocate(std::size_t bytes, std::size_t alignment) noexcept {
  if (fails()) return nullptr;
  const std::size_t rounded = (bytes + alignment) / alignment * alignment;  // never 0
  void* const memory = std::aligned_alloc(alignment, rounded);
  if (memory != nullptr) ++live;
  return memory;
}

void* allocate_or_throw(std::size_t bytes, std::size_t alignment) {
  void* const memory = allocate(bytes, alignment);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

void deallocate(void* memory) noexcept {
  if (memory == nullptr) return;
  --live;
  std::free(memory);
}

constexpr std::size_t kUsual = __STDCPP_DEFAULT_NEW_ALIGNMENT__;

}  // namespace

using Alignment = std::align_val_t;
using Quiet = std::nothrow_t;

void* operator new(std::size_t n) { return allocate_or_throw(n, kUsual); }
void* operator new[](std::size_t n) { return allocate_or_throw(n, kUsual); }
void* operator new(std::size_t n, Alignment a) { return allocate_or_throw(n, std::size_t(a)); }
void* operator new[](std::size_t n, Alignment a) { return allocate_or_throw(n, std::size_t(a)); }
void* operator new(std::size_t n, const Quiet&) noexcept { return allocate(n, kUsual); }
void* operator new[](std::size_t n, const Quiet&) noexcept { return allocate(n, kUsual); }
void operator delete(void* p) noexcept { deallocate(p); }
void operator delete[](void* p) noexcept { deallocate(p); }
void operator delete(void* p, std::size_t) noexcept { deallocate(p); }
void operator delete[](void* p, std::size_t) noexcept { deallocate(p); }
void operator delete(void* p, Alignment) noexcept { deallocate(p); }
void operator delete[](void* p, Alignment) noexcept { deallocate(p); }
void operator delete(void* p, std::size_t, Alignment) noexcept { deallocate(p); }
void operator delete[](void* p, std::size_t, Alignment) noexcept { deallocate(p); }
void operator delete(void* p, const Quiet&) noexcept { deallocate(p); }
void operator delete[](void* p, const Quiet&) noexcept { deallocate(p); }

namespace winnow::tests {
namespace {

enum class Outcome { done, refused, out_of_memory, escaped };

/// Calls `function` while its n-th allocation fails, from 0 on.
template <class Function>
Outcome outcome_of(const Function& function, std::int64_t n) {
  Outcome outcome = Outcome::done;
  failed = 0;
  left = n;
  try {
    function();
  } catch (const Error& error) {
    outcome = error.code() == ErrorCode::out_of_memory ? Outcome::out_of_memory : Outcome::refused;
  } catch (...) {
    outcome = Outcome::escaped;
  }
  left = kNever;
  return outcome;
}

/// Fails each allocation of `function` in turn, alone and with all that follow, until it makes no
/// more of them; that last call has the outcome `expected`. Calls after() behind every call. Gives
/// how many calls ran out of memory.
template <class Function, class After>
int fail_each_allocation(const Function& function, Outcome expected, const After& after) {
  constexpr std::int64_t kMost = 1000;
  int caught = 0;
  for (const bool all_after : {false, true}) {
    all_after_fail = all_after;
    for (std::int64_t n = 0; n < kMost; ++n) {
      SCOPED_TRACE(fmt::format("allocation {}{}", n, all_after ? " and all behind it" : ""));
      outcome_of(function, n);  // what is made once is made here
      after();
      const std::int64_t live_before = live;
      const Outcome outcome = outcome_of(function, n);
      EXPECT_EQ(live, live_before) << "memory was kept";
      after();
      EXPECT_NE(outcome, Outcome::escaped) << "what came out is no Error";
      if (failed == 0) {
        EXPECT_EQ(outcome, expected);
        break;
      }
      if (outcome == Outcome::out_of_memory) ++caught;
      EXPECT_LT(n + 1, kMost) << "it never ends";
    }
  }
  return caught;
}

template <class Function>
int fail_each_allocation(const Function& function, Outcome expected = Outcome::done) {
  return fail_each_allocation(function, expected, [] {});
}

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
  EXPECT_GT(fail_each_allocation([] { mpi_communicator(nullptr); }, Outcome::refused), 0);
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
