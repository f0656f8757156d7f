// SPDX-License-Identifier: Apache-2.0
// The peak memory of a call on the cpu backend is workspace_bytes and little more.
#include <cstdint>
#include <fstream>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <malloc.h>

#include "harness/index_loss.h"
#include "harness/index_topk.h"
#include "harness/sparse_attention.h"
#include "tests/sanitized.h"
#include "tests/testing.h"

namespace winnow::tests {
namespace {

constexpr std::int64_t kMiB = std::int64_t{1} << 20;
/// Allowance for code, thread stacks and task lists.
constexpr std::int64_t kSlack = 64 * kMiB;

/// The peak resident size of this process since the last reset, in bytes.
std::int64_t peak_memory() {
  std::ifstream file("/proc/self/status");
  for (std::string word; file >> word;) {
    std::int64_t kib = 0;
    if (word == "VmHWM:" && file >> kib) return kib * 1024;
  }
  return 0;
}

/// The increase of resident memory while `call` runs; nullopt if the kernel does not report it.
/// Trims the allocator first, so that the call cannot use its cached memory unnoticed.
std::optional<std::int64_t> peak_rise(const std::function<void()>& call) {
  malloc_trim(0);
  if (!(std::ofstream("/proc/self/clear_refs") << 5 << std::flush)) return std::nullopt;
  const std::int64_t before = peak_memory();
  if (before == 0) return std::nullopt;
  call();
  return peak_memory() - before;
}

/// Many queries and keys with little work per pair.
harness::Case many_pairs(std::int64_t rows) {
  return {.name = "many pairs",
          .tokens = rows,
          .rows = rows,
          .documents = 1,
          .heads = 2,
          .qk_dim = 8,
          .v_dim = 8,
          .topk = 16,
          .index_heads = 2,
          .index_dim = 8};
}

/// All outputs have been written before, so that they do not count in the increase.
template <class Args>
void expect_bounded(const char* what, const harness::Case& c, const Args& args,
                    std::int64_t limit) {
  SCOPED_TRACE(fmt::format("{} within {} MiB", what, limit / kMiB));
  const Execution execution{.backend = Backend::cpu,
                            .workspace_limit = static_cast<std::size_t>(limit)};
  const auto bound = static_cast<std::int64_t>(workspace_bytes(args, execution)) + kSlack;
  EXPECT_LT(bound, 2 * c.tokens * c.rows) << "a bf16 buffer of all pairs would not be found out";
  const auto rise = peak_rise([&] { run(args, execution); });
  ASSERT_TRUE(rise.has_value());
  EXPECT_LE(*rise, bound);
}

class PeakMemory : public ::testing::Test {
 protected:
  void SetUp() override {
    if (kSanitized) GTEST_SKIP() << "sanitizers need memory of their own";
    if (!peak_rise([] {})) GTEST_SKIP() << "the kernel does not reset the peak of a process";
  }
};

TEST_F(PeakMemory, IsSeen) {
  const auto rise = peak_rise([] { const std::vector<char> touched(100 * kMiB, 1); });
  ASSERT_TRUE(rise.has_value());
  EXPECT_GE(*rise, 99 * kMiB);
  EXPECT_LE(*rise, 101 * kMiB);
}

TEST_F(PeakMemory, OfSparseAttentionIsItsWorkspace) {
  const harness::Case c = many_pairs(16384);
  const harness::SparseAttentionWork work(c, {}, 1);
  for (const std::int64_t limit : {16 * kMiB, 256 * kMiB}) {
    expect_bounded("forward", c, work.forward, limit);
    expect_bounded("backward", c, work.backward, limit);
    expect_bounded("backward, rounded", c, work.backward_rounded, limit);
  }
}

TEST_F(PeakMemory, OfIndexTopkIsItsWorkspace) {
  const harness::Case c = many_pairs(16384);
  const harness::IndexTopkWork work(c, {}, 1);
  for (const std::int64_t limit : {16 * kMiB, 256 * kMiB}) {
    expect_bounded("forward", c, work.forward, limit);
    expect_bounded("backward", c, work.backward, limit);
    expect_bounded("replay", c, work.replay, limit);
    expect_bounded("backward of replay, rounded", c, work.replay_backward, limit);
  }
}

TEST_F(PeakMemory, OfDenseIndexLossIsItsWorkspace) {
  const harness::Case c = many_pairs(8192);  // quadratic in the number of rows
  const harness::DenseIndexLossWork work(c, {}, 1);
  expect_bounded("forward", c, work.forward, 16 * kMiB);
  expect_bounded("forward, lse given", c, work.forward_given, 16 * kMiB);
  expect_bounded("backward", c, work.backward, 16 * kMiB);
}

}  // namespace
}  // namespace winnow::tests
