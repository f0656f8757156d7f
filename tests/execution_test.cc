// SPDX-License-Identifier: Apache-2.0
// Execution: choice of the backend, no output to the terminal, calls from many threads at once, in
// each other and in a forked process.
#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include <sys/wait.h>
#include <unistd.h>

#include "core/threads.h"
#include "tests/attention_calls.h"
#include "tests/sanitized.h"

namespace winnow::tests {
namespace {

// Must run first, since a library may print some messages only once.
TEST(Execution, PrintsNothing) {
  on_each_backend([](Backend backend) {
    const Attention a = filled({.tokens = 64}, 1);
    ::testing::internal::CaptureStdout();
    ::testing::internal::CaptureStderr();
    for (const int threads : {0, 1, 3, 1024}) forward(a, {.backend = backend, .threads = threads});
    const std::string printed =
        ::testing::internal::GetCapturedStdout() + ::testing::internal::GetCapturedStderr();
    EXPECT_EQ(printed, "");
  });
}

TEST(Execution, AutomaticTakesTheFastestBackendOnTheHost) {
  const Attention a = filled({}, 2);
  const Backend best = why_not(Backend::cpu).empty() ? Backend::cpu : Backend::reference;
  const AttentionForwardWork work(a, {});
  EXPECT_EQ(why_not(work.args), "");
  sparse_attention_forward(work.args);
  expect_same_bits(work.outputs(), forward(a, on(best)));
  EXPECT_EQ(why_not(Backend::automatic), "");
}

TEST(Execution, AutomaticTakesTheReferenceWhereOthersCannot) {
  const Attention a = filled({.dtype = DType::f64}, 3);
  const AttentionForwardWork work(a, {});
  EXPECT_EQ(why_not(work.args), "");
  sparse_attention_forward(work.args);
  expect_same_bits(work.outputs(), forward(a, on(Backend::reference)));
  for (const Backend backend : {Backend::cpu, Backend::cuda}) {
    const std::string reason = why_not(work.args, on(backend));
    EXPECT_NE(reason, "");
    EXPECT_EQ(refusal_of([&] { sparse_attention_forward(work.args, on(backend)); }),
              "sparse_attention_forward: " + reason);
  }
}

TEST(Execution, RefusalsOfAHostCallNameBackendsOfTheHost) {
  // A limit of 0 is a limit, not the default.
  const AttentionForwardWork work(filled({}, 3), {});
  const std::string reason = why_not(work.args, {.workspace_limit = 0});
  EXPECT_TRUE(reason.starts_with("the cpu backend's kernel")) << reason;
  EXPECT_EQ(reason.find("cuda"), std::string::npos) << reason;
}

TEST(Execution, EveryBackendTakesEveryWorkingType) {
  on_each_backend([](Backend backend) {
    for (const DType dtype : {DType::bf16, DType::f16, DType::f32}) {
      const AttentionForwardWork work(filled({.dtype = dtype}, 4), harness::device_of(backend));
      EXPECT_EQ(why_not(work.args, on(backend)), "") << name(dtype);
    }
  });
}

TEST(Execution, UsableBackendsDescribeThemselves) {
  on_each_backend([](Backend backend) { EXPECT_NE(describe(backend), ""); });
  EXPECT_NE(std::string(version()), "");
}

TEST(Execution, ManyThreadsMayCallAtOnce) {
  on_each_backend([](Backend backend) {
    const Attention a = with_sink(filled({.tokens = 20}, 5), 5);
    const Execution execution{.backend = backend, .deterministic = true};
    const AttentionOutputs outputs = forward(a, execution);
    const AttentionGradients gradients = backward(a, outputs, execution);
    std::vector<AttentionOutputs> all_outputs(8);
    std::vector<AttentionGradients> all_gradients(8);
    {
      std::vector<std::jthread> callers;
      for (std::size_t i = 0; i < all_outputs.size(); ++i)
        callers.emplace_back([&, i] {
          for (int repeat = 0; repeat < 5; ++repeat) {
            all_outputs[i] = forward(a, execution);
            all_gradients[i] = backward(a, all_outputs[i], execution);
          }
        });
    }
    for (std::size_t i = 0; i < all_outputs.size(); ++i) {
      expect_same_bits(all_outputs[i], outputs);
      expect_same_bits(all_gradients[i], gradients);
    }
  });
}

TEST(Execution, AForkedProcessMayCall) {
  if (kSanitized) GTEST_SKIP() << "sanitizers have threads of their own";
  const Attention a = filled({.tokens = 40}, 7);
  for (const Backend backend : {Backend::cpu, Backend::reference}) {
    const Execution execution{.backend = backend, .threads = 2};
    const AttentionOutputs outputs = forward(a, execution);  // the child has not its worker
    const pid_t child = fork();
    if (child == 0) {
      alarm(30);  // ends a child that hangs
      bool same = true;
      for (int i = 0; i < 20 && same; ++i)
        same = static_cast<bool>(same_bits(forward(a, execution).out, outputs.out));
      _exit(same ? 0 : 1);
    }
    int status = -1;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
    expect_same_bits(forward(a, execution), outputs);
  }
}

TEST(Execution, TasksMayHaveTasks) {
  constexpr std::int64_t kTasks = 20;
  for (const int threads : {1, 2, 3}) {
    std::atomic<std::int64_t> sum = 0;
    parallel_for({.threads = threads}, kTasks, 0, [&](std::int64_t i, Scratch) {
      parallel_for({.threads = 2}, i, 0, [&](std::int64_t j, Scratch) { sum += j; });
    });
    EXPECT_EQ(sum, kTasks * (kTasks - 1) * (kTasks - 2) / 6);
  }
}

TEST(Execution, ErrorsOfOneThreadAreItsOwn) {
  std::vector<std::string> texts(8);
  {
    std::vector<std::jthread> callers;
    for (std::size_t i = 0; i < texts.size(); ++i)
      callers.emplace_back([&, i] {
        for (int repeat = 0; repeat < 100; ++repeat)
          texts[i] = refusal_of([&] {
            AttentionForwardWork work(filled(Attention{}, 6), {});
            sparse_attention_forward(work.args, {.threads = -1 - static_cast<int>(i)});
          });
      });
  }
  for (std::size_t i = 0; i < texts.size(); ++i)
    EXPECT_EQ(texts[i],
              fmt::format("sparse_attention_forward: threads -{}: must be at least 0", i + 1));
}

}  // namespace
}  // namespace winnow::tests
