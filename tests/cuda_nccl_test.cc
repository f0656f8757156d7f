// SPDX-License-Identifier: Apache-2.0
// The communicator over NCCL, with one rank: the checks of all communicators, and the time-out.
// Built with CUDA only.
#include <atomic>
#include <thread>

#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include "tests/rank_checks.h"

namespace winnow::tests {
namespace {

constexpr Device kDevice{DeviceKind::cuda, 0};

struct UniqueId {
  char bytes[128];
};

/// An NCCL communicator of one rank on device 0.
class Nccl : public ::testing::Test {
 protected:
  void SetUp() override {
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0)
      GTEST_SKIP() << "this machine has no CUDA device";
    library_ = dlopen("libnccl.so.2", RTLD_NOW);
    if (library_ == nullptr) GTEST_SKIP() << dlerror();
    ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
    UniqueId id{};
    ASSERT_EQ(find<int(UniqueId*)>("ncclGetUniqueId")(&id), 0);
    ASSERT_EQ((find<int(ncclComm**, int, UniqueId, int)>("ncclCommInitRank")(&comm_, 1, id, 0)), 0);
  }
  void TearDown() override {
    if (comm_ != nullptr) find<int(ncclComm*)>("ncclCommDestroy")(comm_);
  }

  template <class Function>
  Function* find(const char* name) const {
    return reinterpret_cast<Function*>(dlsym(library_, name));
  }

  /// Called after a failure: the communicator has aborted comm_, so it must not be destroyed.
  void forget_comm() { comm_ = nullptr; }

  void* library_ = nullptr;
  ncclComm* comm_ = nullptr;
};

TEST_F(Nccl, KeepsTheRulesOfAllCommunicators) {
  const auto ranks = nccl_communicator(comm_);
  EXPECT_EQ(ranks->rank(), 0);
  EXPECT_EQ(ranks->size(), 1);
  check_gathered_rows_stand_in_global_order(*ranks, kDevice);
  check_gradients_are_sums_over_ranks(*ranks, kDevice);
  check_gradients_are_rounded_once(*ranks, kDevice);
  check_workspaces(*ranks, kDevice);
  check_traffic(*ranks, kDevice);
}

TEST_F(Nccl, AStepOfOneRankEqualsAStepAlone) {
  const std::string reason = why_not(Backend::cuda);
  if (!reason.empty()) GTEST_SKIP() << "the cuda backend " << reason;
  check_many_ranks_equal_one(*nccl_communicator(comm_), kDevice);
}

/// Permutes rows as with several ranks, with widths for vector and for scalar copies.
TEST_F(Nccl, RowsChangeTheirOrder) {
  const auto ranks = nccl_communicator(comm_);
  constexpr std::int64_t kTokens = 1000;
  Shards shards{{{}}};
  for (std::int32_t row = 0; row < kTokens; row += 10)  // runs of 10 rows in reverse order
    for (std::int32_t i = 0; i < 10; ++i)
      shards.rows[0].push_back(static_cast<std::int32_t>(kTokens) - 10 - row + i);
  for (const DType dtype : {DType::bf16, DType::f32, DType::f8_e4m3, DType::f64}) {
    for (const std::int64_t width : {1, 7, 64, 576}) {
      const Values all = as_stored(dtype, normals(kTokens * width, 3, "rows"));
      const Buffer shard =
          floats(kDevice, dtype, {kTokens, width}, rows_of(all, shards.rows[0], width));
      const Buffer whole(kDevice, dtype, {kTokens, width});
      gather_keys(*ranks, shard.tensor(), whole.tensor(), shards);
      ranks->wait({});
      EXPECT_TRUE(same_bits(whole.download(), all));
      expect_canaries_intact(whole);
    }
  }
  for (const DType dtype : {DType::bf16, DType::f16, DType::f32}) {
    const Values sums = as_stored(DType::f32, normals(kTokens * 12, 4, "sums"));
    const Buffer whole = floats(kDevice, DType::f32, {kTokens, 12}, sums);
    const Buffer shard(kDevice, dtype, {kTokens, 12}, 4);
    scatter_key_grads(*ranks, whole.tensor(), shard.tensor(), shards);
    ranks->wait({});
    EXPECT_TRUE(same_bits(shard.download(), as_stored(dtype, rows_of(sums, shards.rows[0], 12))));
    expect_canaries_intact(shard);
  }
}

TEST_F(Nccl, ManyCollectivesNeedNoWait) {
  const auto ranks = nccl_communicator(comm_);
  const std::vector<std::int64_t> rows{4};
  const Buffer shard = floats(kDevice, DType::f32, {4, 2}, {1, 2, 3, 4, 5, 6, 7, 8});
  const Buffer whole(kDevice, DType::f32, {4, 2});
  for (int i = 0; i < 300; ++i) ranks->all_gather(shard.tensor(), whole.tensor(), rows, {});
  ranks->wait({});
  EXPECT_EQ(whole.download(), shard.download());
}

TEST_F(Nccl, RefusesHostTensorsByName) {
  const auto ranks = nccl_communicator(comm_);
  const Buffer host({}, DType::f32, {4, 2});
  const std::vector<std::int64_t> rows{4};
  EXPECT_EQ(refusal_of([&] { ranks->all_gather(host.tensor(), host.tensor(), rows, {}); }),
            "all_gather: shard f32[4, 2]: must be on cuda:0, as the communicator");
}

/// A host function ahead of the collective blocks the stream, as if another rank were missing.
TEST_F(Nccl, WaitsNoLongerThanTheTimeout) {
  constexpr std::chrono::milliseconds kTimeout{500};
  std::atomic<bool> blocked{true};
  cudaStream_t stream = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  const Buffer shard = floats(kDevice, DType::f32, {4, 2}, Values(8, 1.0));
  const Buffer whole(kDevice, DType::f32, {4, 2});
  {
    const auto ranks = nccl_communicator(comm_, kTimeout);
    forget_comm();
    const std::vector<std::int64_t> rows{4};
    ranks->all_gather(shard.tensor(), whole.tensor(), rows, {.stream = stream});
    ranks->wait({.stream = stream});
    ASSERT_EQ(cudaLaunchHostFunc(
                  stream,
                  [](void* flag) {
                    while (*static_cast<std::atomic<bool>*>(flag))
                      std::this_thread::sleep_for(std::chrono::milliseconds(1));
                  },
                  &blocked),
              cudaSuccess);
    ranks->all_gather(shard.tensor(), whole.tensor(), rows, {.stream = stream});
    const auto start = std::chrono::steady_clock::now();
    const std::string text = communication_failure([&] { ranks->wait({.stream = stream}); });
    const auto waited = std::chrono::steady_clock::now() - start;
    EXPECT_NE(text.find("time-out"), std::string::npos) << text;
    EXPECT_GE(waited, kTimeout);
    EXPECT_LT(waited, 2 * kTimeout);
    EXPECT_NE(communication_failure([&] {
                ranks->all_gather(shard.tensor(), whole.tensor(), rows, {.stream = stream});
              }),
              "");
    blocked = false;  // the communicator is destroyed before the stream continues
  }
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  cudaStreamDestroy(stream);
}

}  // namespace
}  // namespace winnow::tests
