// SPDX-License-Identifier: Apache-2.0
// Context parallel over MPI with ranks as processes: starts jobs on this machine and checks their
// exit codes and output. Built with MPI only.
#include "winnow/mpi.h"

#include <chrono>
#include <cstdio>
#include <filesystem>
#include <regex>

#include <mpi.h>
#include <sys/wait.h>

#include "tests/failing_allocations.h"
#include "tests/sanitized.h"
#include "tests/testing.h"

namespace winnow::tests {
namespace {

/// Exit code and output of a job.
struct Job {
  int exit_code = -1;
  double seconds = 0;
  std::string output;
};

Job run(const std::string& command) {
  Job job;
  const auto start = std::chrono::steady_clock::now();
  std::FILE* const pipe = popen((command + " 2>&1").c_str(), "r");
  if (pipe == nullptr) return job;
  char text[4096];
  while (std::fgets(text, sizeof(text), pipe) != nullptr) job.output += text;
  const int status = pclose(pipe);
  job.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  job.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return job;
}

/// Runs a program from the folder of this one on so many ranks. After `seconds` it is killed and
/// the exit code is 124.
Job run_ranks(int ranks, const std::string& program, int seconds) {
  const std::filesystem::path here = std::filesystem::read_symlink("/proc/self/exe").parent_path();
  // Open MPI: allowed as root, and with more ranks than cores. The address sanitizer reports leaks
  // of Open MPI itself, so leaks are checked only in the tests with ranks as threads.
  return run(
      fmt::format("env OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 "
                  "OMPI_MCA_rmaps_base_oversubscribe=1 OMPI_MCA_hwloc_base_binding_policy=none "
                  "OMPI_MCA_mpi_yield_when_idle=1 ASAN_OPTIONS=detect_leaks=0 "
                  "timeout --kill-after=5 {} mpirun -n {} {}/{}",
                  seconds, ranks, here.string(), program));
}

/// Why no job can be started here; empty if one can. With an mpirun of another MPI than that of the
/// library, ranks do not find each other.
std::string why_no_jobs() {
  const Job asked = run("mpirun --version");
  if (asked.exit_code != 0) return "this machine has no mpirun";
  char library[MPI_MAX_LIBRARY_VERSION_STRING];
  int length = 0;
  MPI_Get_library_version(library, &length);
  std::smatch version;
  if (std::regex_search(asked.output, version, std::regex("[0-9]+\\.[0-9]+(\\.[0-9]+)?")) &&
      std::string(library).find(version.str()) != std::string::npos)
    return {};
  return fmt::format("mpirun is not of the MPI that was loaded: {} beside {}", asked.output,
                     library);
}

std::int64_t count(const std::string& text, const char* pattern) {
  const std::regex regex(pattern);
  return std::distance(std::sregex_iterator(text.begin(), text.end(), regex),
                       std::sregex_iterator());
}

class MpiJobs : public ::testing::Test {
 protected:
  void SetUp() override {
    static const std::string reason = why_no_jobs();
    if (!reason.empty()) GTEST_SKIP() << reason;
  }
};

class MpiTool : public MpiJobs {
 protected:
  void SetUp() override {
    MpiJobs::SetUp();
    if (kSanitized) GTEST_SKIP() << "this build is for the library, without the tool";
  }
};

class MpiRanks : public MpiJobs, public ::testing::WithParamInterface<int> {};

TEST_P(MpiRanks, PassAllChecks) {
  const Job job = run_ranks(GetParam(), "mpi_rank --gtest_brief=1 --gtest_filter='-Slow*'", 120);
  EXPECT_EQ(job.exit_code, 0) << job.output;
  EXPECT_EQ(count(job.output, "PASSED"), GetParam()) << job.output;
}

INSTANTIATE_TEST_SUITE_P(Of, MpiRanks, ::testing::Values(1, 2, 3, 4, 8));

class SlowMpiJobs : public MpiJobs {};

TEST_F(SlowMpiJobs, KeepNoMemoryOfCommunicators) {
  const Job job = run_ranks(2, "mpi_rank --gtest_brief=1 --gtest_filter='Slow*'", 300);
  EXPECT_EQ(job.exit_code, 0) << job.output;
  EXPECT_EQ(count(job.output, "PASSED"), 2) << job.output;
}

TEST_F(MpiJobs, EndWhenARankIsKilled) {
  const Job job = run_ranks(4, "mpi_failing_rank killed", 60);
  EXPECT_NE(job.exit_code, 0) << job.output;
  EXPECT_LT(job.seconds, 30) << job.output;
}

TEST_F(MpiJobs, GetAnErrorWhenARankHangs) {
  const Job job = run_ranks(4, "mpi_failing_rank stopped", 60);
  EXPECT_NE(job.exit_code, 0) << job.output;
  EXPECT_LT(job.seconds, 30) << job.output;
  EXPECT_EQ(count(job.output, "after [23]\\.. s: .* on rank [0-2] of 4: time-out"), 3)
      << job.output;
}

TEST_F(MpiTool, RunsATrainingStepThatEqualsOneRank) {
  for (const char* options : {"--case glm-5.2", "--case deepseek-v4-flash --sharding contiguous"}) {
    const Job job = run_ranks(
        4, fmt::format("winnow run --context-parallel --tokens 96 {} --json", options), 120);
    EXPECT_EQ(job.exit_code, 0) << job.output;
    EXPECT_EQ(count(job.output, "\"gathered_bytes\": [1-9]"), 4) << job.output;
    EXPECT_EQ(count(job.output, "\"ok\": true"), 1) << job.output;
  }
}

TEST_F(MpiTool, EndsWhenARankHasAnError) {
  const Job job =
      run_ranks(8, "winnow run --context-parallel --tokens 16 --case deepseek-v4-flash", 60);
  EXPECT_EQ(job.exit_code, 1) << job.output;
  EXPECT_NE(job.output.find("--tokens 16: too few for 8 ranks"), std::string::npos) << job.output;
  EXPECT_LT(job.seconds, 30);
}

TEST(MpiCommunicator, IsRefusedWithoutCommAndOutsideMpi) {
  EXPECT_EQ(refusal_of([] { mpi_communicator(nullptr); }),
            "mpi_communicator: comm null: must be given");
  const MPI_Comm world = MPI_COMM_WORLD;
  EXPECT_EQ(refusal_of([&] { mpi_communicator(&world); }),
            "mpi_communicator: comm outside MPI: must be used between MPI_Init and MPI_Finalize");
  EXPECT_GT(fail_each_allocation([] { mpi_communicator(nullptr); }, Outcome::refused), 0);
}

TEST_F(MpiJobs, RunTheExample) {
  const Job job = run_ranks(2, "context_parallel", 60);
  EXPECT_EQ(job.exit_code, 0) << job.output;
  EXPECT_EQ(count(job.output, "rank [01] of 2: "), 2) << job.output;
}

}  // namespace
}  // namespace winnow::tests
