// SPDX-License-Identifier: Apache-2.0
// fuzz: random calls without end, until a time or a number of calls is reached or one goes wrong.
//   fuzz [--seconds N] [--calls N] [--seed N] [--backend reference|cpu|cuda] [--in-process]
// The calls have consecutive seeds, from the given one or a random one on. A call that crashes,
// hangs or is judged wrong ends the run with its seed; `--seed N --calls 1` makes it again.
#include "tests/fuzz.h"

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <thread>

#include <CLI/CLI.hpp>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/failing_allocations.h"
#include "tests/fuzz_batches.h"

namespace winnow::tests {
namespace {

constexpr std::chrono::seconds kHang{120};  // a call takes milliseconds

struct Options {
  double seconds = std::numeric_limits<double>::infinity();
  std::uint64_t calls = std::numeric_limits<std::uint64_t>::max();
  std::uint64_t seed = 0;
  Backend backend = Backend::cpu;
  bool in_process = false;
};

Options options;

/// Calls begun, which the process that makes them tells the one that watches it.
std::atomic<std::uint64_t>* calls_begun = nullptr;

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

TEST(Fuzz, CallsAreComputedRightOrRefused) {
  ASSERT_EQ(why_not(options.backend), "");
  Fuzz operators(options.backend);
  operators.run = [](const Spoilt& spoilt, std::uint64_t seed) {
    // The CUDA runtime allocates within its own calls, which is not ours to test.
    const bool has_memory = options.backend == Backend::cuda || seed % 2 == 0;
    if (has_memory || !spoilt.mutations.empty()) return spoilt.call.run(spoilt.execution);
    struct Restore {
      ~Restore() { left = kNever; }
    } const restore;
    left = Random(seed, "allocation").below(0, 40);
    spoilt.call.run(spoilt.execution);
  };
  BatchFuzz batches;
  const Clock::time_point start = Clock::now();
  std::uint64_t calls = 0;
  while (calls < options.calls && seconds_since(start) < options.seconds && !HasFailure()) {
    const std::uint64_t seed = options.seed + calls;
    *calls_begun = ++calls;
    if (seed % 16 == 0) {
      batches.call(seed);
    } else {
      operators.call(seed, [](const Error&) {});
    }
  }
  fmt::print(
      "{} calls on {}, seeds {} to {}, in {:.0f} s: {} computed, {} refused, "
      "{} without memory\n",
      calls, name(options.backend), options.seed, options.seed + calls - 1, seconds_since(start),
      operators.computed + batches.computed, operators.refused + batches.refused,
      operators.out_of_memory);
}

/// Waits for the process that makes the calls. Its exit status; ends it if it hangs.
int watch(pid_t child) {
  std::uint64_t last = 0;
  Clock::time_point moved = Clock::now();
  for (int status = 0;;) {
    if (waitpid(child, &status, WNOHANG) == child)
      return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    if (*calls_begun != last) {
      last = *calls_begun;
      moved = Clock::now();
    } else if (Clock::now() - moved > kHang) {
      fmt::print("no answer for {} s\n", kHang.count());
      kill(child, SIGKILL);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
}

int run(int argc, char** argv) {
  CLI::App app("Makes random calls of every operator, most of them spoilt.");
  std::string backend(name(options.backend));
  options.seed = std::random_device()();
  app.add_option("--seconds", options.seconds, "the time after which to stop");
  app.add_option("--calls", options.calls, "the number of calls after which to stop");
  app.add_option("--seed", options.seed, "the seed of the first call; random without it");
  app.add_option("--backend", backend, "reference, cpu or cuda")
      ->check(CLI::IsMember({"reference", "cpu", "cuda"}));
  app.add_flag("--in-process", options.in_process,
               "make the calls in this process, so that debuggers see them; nobody tells the seed "
               "of a crash");
  CLI11_PARSE(app, argc, argv);
  options.backend = backend_from_name(backend);

  void* const shared = mmap(nullptr, sizeof(*calls_begun), PROT_READ | PROT_WRITE,
                            MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (shared == MAP_FAILED) return 1;
  calls_begun = new (shared) std::atomic<std::uint64_t>(0);
  fmt::print("seed {}\n", options.seed);
  std::fflush(stdout);
  // CUDA, which does not survive a fork, has not started yet.
  const pid_t child = options.in_process ? 0 : fork();
  if (child < 0) return 1;
  if (child == 0) {
    int count = 1;
    ::testing::InitGoogleTest(&count, argv);
    return RUN_ALL_TESTS();
  }
  const int status = watch(child);
  if (status != 0) {
    fmt::print("failed; to repeat it: {} --backend {} --seed {} --calls 1\n", argv[0], backend,
               options.seed + *calls_begun - 1);
  }
  return status;
}

}  // namespace
}  // namespace winnow::tests

int main(int argc, char** argv) { return winnow::tests::run(argc, argv); }
