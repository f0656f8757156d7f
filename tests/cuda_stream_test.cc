// SPDX-License-Identifier: Apache-2.0
// Calls on a GPU can be captured into a CUDA graph and use no more memory than workspace_bytes.
// Built with CUDA only.
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include "harness/cases.h"
#include "harness/index_loss.h"
#include "harness/index_topk.h"
#include "harness/quantize_fp8.h"
#include "harness/sparse_attention.h"
#include "harness/value_projection.h"
#include "harness/windows.h"
#include "tests/testing.h"

namespace winnow::tests {
namespace {

constexpr Device kDevice{DeviceKind::cuda, 0};

class OnCuda : public ::testing::Test {
 protected:
  void SetUp() override {
    const std::string reason = why_not(Backend::cuda);
    if (!reason.empty()) GTEST_SKIP() << "the cuda backend " << reason;
  }
};

class Stream {
 public:
  Stream() { EXPECT_EQ(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), cudaSuccess); }
  ~Stream() { cudaStreamDestroy(stream_); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  operator cudaStream_t() const { return stream_; }  // NOLINT(google-explicit-constructor)

 private:
  cudaStream_t stream_ = nullptr;
};

/// Captures the call into a graph and launches it twice.
void run_as_graph(const std::function<void(cudaStream_t)>& call) {
  const Stream stream;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  call(stream);
  ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  ASSERT_EQ(cudaGraphInstantiate(&executable, graph, 0), cudaSuccess);
  for (int i = 0; i < 2; ++i) ASSERT_EQ(cudaGraphLaunch(executable, stream), cudaSuccess);
  ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
}

Values values_of(const Buffer& buffer) {
  if (buffer.tensor().dtype != DType::i32) return buffer.download();
  const Ints ints = buffer.download_ints();
  return {ints.begin(), ints.end()};
}

/// The outputs from a graph are bitwise those of the call itself, with a workspace of the call and
/// with one of the caller.
template <class Args>
void expect_same_from_a_graph(const Args& args, std::vector<Buffer*> outputs,
                              bool deterministic = true) {
  const Execution direct{.backend = Backend::cuda, .deterministic = deterministic};
  run(args, direct);
  std::vector<Values> expected;
  for (const Buffer* output : outputs) expected.push_back(values_of(*output));
  const std::size_t bytes = workspace_bytes(args, direct);
  const Buffer workspace(kDevice, DType::i32, {static_cast<std::int64_t>(bytes / 4) + 1});
  for (const bool with_workspace : {false, true}) {
    for (Buffer* output : outputs) output->poison();
    run_as_graph([&](cudaStream_t stream) {
      Execution execution = direct;
      execution.stream = stream;
      if (with_workspace) {
        execution.workspace = workspace.tensor().data;
        execution.workspace_bytes = bytes;
      }
      run(args, execution);
    });
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      EXPECT_TRUE(same_bits(values_of(*outputs[i]), expected[i]));
    }
  }
}

class CapturedCalls : public OnCuda {
 protected:
  // One shape of the specialised kernels and one of the general kernels.
  static std::vector<harness::Case> cases() {
    harness::Case model = harness::find_case("glm-5.2-small");
    model.qk_dim = 576;
    model.v_dim = 512;
    model.heads = 64;
    model.index_heads = 32;
    model.index_dim = 128;
    return {model, harness::find_case("deepseek-v4-flash-small")};
  }
};

TEST_F(CapturedCalls, OfWindows) {
  for (const harness::Case& c : cases()) {
    const harness::KeyWindowsWork windows(c, {.device = kDevice}, 1);
    expect_same_from_a_graph(windows.args, {&windows.begin, &windows.end});
    const harness::WindowIndicesWork lists(c, {.device = kDevice}, 1);
    expect_same_from_a_graph(lists.args, {&lists.indices, &lists.lengths});
  }
}

TEST_F(CapturedCalls, OfTheIndexer) {
  for (const harness::Case& c : cases()) {
    for (const bool fp8 : {false, true}) {
      const harness::IndexTopkWork work(c, {.device = kDevice}, 1, fp8);
      expect_same_from_a_graph(work.forward, {&work.indices, &work.lengths, &work.scores});
      expect_same_from_a_graph(work.replay, {&work.replay_scores});
    }
  }
}

/// A selection in so many chunks that the device counts them.
class ManyChunks : public OnCuda {
 protected:
  static harness::Case case_of(std::int64_t documents) {
    harness::Case c = harness::find_case("glm-5.2-small");
    c.tokens = 1024;
    c.rows = 2048;
    c.documents = documents;
    c.empty_rows = true;
    c.index_heads = 32;
    c.index_dim = 128;
    return c;
  }
  static Execution in_chunks() {
    return {.backend = Backend::cuda, .workspace_limit = std::size_t{256} << 10};
  }
  /// The outputs in one chunk; they are poisoned then.
  static std::vector<Values> expected_of(const harness::IndexTopkWork& work) {
    run(work.forward, {.backend = Backend::cuda});
    std::vector<Values> expected;
    for (Buffer* output : outputs_of(work)) {
      expected.push_back(values_of(*output));
      output->poison();
    }
    return expected;
  }
  static void expect_bits(const harness::IndexTopkWork& work, const std::vector<Values>& expected) {
    for (std::size_t i = 0; i < expected.size(); ++i)
      EXPECT_TRUE(same_bits(values_of(*outputs_of(work)[i]), expected[i]));
  }

 private:
  static std::vector<Buffer*> outputs_of(const harness::IndexTopkWork& work) {
    return {&work.indices, &work.lengths, &work.scores};
  }
};

TEST_F(ManyChunks, GiveTheSameBits) {
  for (const std::int64_t documents : {1, 20, 200}) {  // the more, the fewer chunks have rows
    SCOPED_TRACE(documents);
    const harness::IndexTopkWork work(case_of(documents), {.device = kDevice}, 1);
    const std::vector<Values> expected = expected_of(work);
    for (int i = 0; i < 3; ++i) run(work.forward, in_chunks());
    expect_bits(work, expected);
  }
}

TEST_F(ManyChunks, CanBeCaptured) {
  const harness::IndexTopkWork work(case_of(1), {.device = kDevice}, 1);
  const std::vector<Values> expected = expected_of(work);
  run_as_graph([&](cudaStream_t stream) {
    Execution execution = in_chunks();
    execution.stream = stream;
    run(work.forward, execution);
  });
  expect_bits(work, expected);
}

TEST_F(ManyChunks, RunBesideACaptureOfAnotherThread) {
  const harness::IndexTopkWork work(case_of(1), {.device = kDevice}, 1);
  const std::vector<Values> expected = expected_of(work);
  const Stream captured, stream;
  Execution execution = in_chunks();
  execution.stream = stream;
  execution.workspace_bytes = workspace_bytes(work.forward, execution);
  const Buffer workspace(kDevice, DType::i32,
                         {static_cast<std::int64_t>(execution.workspace_bytes / 4) + 1});
  execution.workspace = workspace.tensor().data;
  cudaGraph_t graph = nullptr;
  ASSERT_EQ(cudaStreamBeginCapture(captured, cudaStreamCaptureModeGlobal), cudaSuccess);
  std::thread([&] {
    for (int i = 0; i < 2; ++i) run(work.forward, execution);
  }).join();
  EXPECT_EQ(cudaStreamEndCapture(captured, &graph), cudaSuccess);
  cudaGraphDestroy(graph);
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  expect_bits(work, expected);
}

// A host function holds the stream back, for seconds if the calls wait for it.
TEST_F(ManyChunks, DoNotWaitForTheStream) {
  const harness::IndexTopkWork work(case_of(1), {.device = kDevice}, 1);
  const std::vector<Values> expected = expected_of(work);
  const Stream stream;
  Execution execution = in_chunks();
  execution.stream = stream;
  run(work.forward, execution);  // loads the kernels
  ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  std::atomic<bool> may_go_on = false;
  const auto hold = [](void* flag) {
    for (int i = 0; i < 5000 && !*static_cast<std::atomic<bool>*>(flag); ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
  };
  ASSERT_EQ(cudaLaunchHostFunc(stream, hold, &may_go_on), cudaSuccess);
  for (int i = 0; i < 3; ++i) run(work.forward, execution);
  EXPECT_EQ(cudaStreamQuery(stream), cudaErrorNotReady);
  may_go_on = true;
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  expect_bits(work, expected);
}
TEST_F(CapturedCalls, OfAttention) {
  for (const harness::Case& c : cases()) {
    const harness::SparseAttentionWork work(c, {.device = kDevice}, 1);
    expect_same_from_a_graph(work.forward, {&work.out, &work.lse});
  }
}

TEST_F(CapturedCalls, OfTheValueProjection) {
  const harness::ValueProjectionWork work(cases()[0], {.device = kDevice}, 1);
  expect_same_from_a_graph(work.forward, {&work.out_v});
  expect_same_from_a_graph(work.backward_rounded, {&work.d_out, &work.d_w_v_rounded});
}

// Gradients of keys in bf16, which are overwritten; fp32 ones would be added to by every launch.
TEST_F(CapturedCalls, OfGradients) {
  for (const harness::Case& c : cases()) {
    const harness::SparseAttentionWork attention(c, {.device = kDevice}, 1);
    run(attention.forward, {.backend = Backend::cuda});
    expect_same_from_a_graph(attention.backward_rounded, {&attention.d_q, &attention.d_kv_rounded});
    const harness::IndexTopkWork indexer(c, {.device = kDevice}, 1);
    expect_same_from_a_graph(indexer.replay_backward,
                             {&indexer.d_q, &indexer.d_weights, &indexer.d_k_rounded});
  }
}

// With one row more than the GPU has multiprocessors Hopper's kernel splits lists between thread
// blocks, which tell each other through memory that every launch finds zero.
TEST_F(CapturedCalls, OfSplitLists) {
  int multiprocessors = 0;
  ASSERT_EQ(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, 0),
            cudaSuccess);
  harness::Case c = cases()[0];
  c.tokens = multiprocessors + 1;
  c.rows = std::max(c.rows, c.tokens);
  const harness::SparseAttentionWork work(c, {.device = kDevice}, 1);
  run(work.forward, {.backend = Backend::cuda});
  expect_same_from_a_graph(work.backward, {&work.d_q}, /*deterministic=*/false);
}

TEST_F(CapturedCalls, OfTheTrainingOfTheIndexer) {
  const harness::Case c = cases()[0];
  const harness::IndexTargetWork target(c, {.device = kDevice}, 1);
  expect_same_from_a_graph(target.args, {&target.target});
  const harness::IndexLossWork loss(c, {.device = kDevice}, 1);
  expect_same_from_a_graph(loss.args, {&loss.loss, &loss.d_scores});
  const harness::DenseIndexLossWork dense(c, {.device = kDevice}, 1);
  expect_same_from_a_graph(dense.forward, {&dense.loss, &dense.lse});
  expect_same_from_a_graph(dense.forward_given, {&dense.loss});
  expect_same_from_a_graph(dense.backward_rounded,
                           {&dense.d_index_q, &dense.d_weights, &dense.d_index_k_rounded});
  const harness::QuantizeFp8Work fp8(c, {.device = kDevice}, 1);
  expect_same_from_a_graph(fp8.of_keys, {&fp8.key_values, &fp8.key_scale});
}

TEST_F(OnCuda, DeterministicGradientsAreTheSameBitsAHundredTimes) {
  harness::Case c = harness::find_case("deepseek-v4-flash");
  c.tokens = 200;
  c.rows = 512;
  c.heads = 72;
  c.topk = 128 + 64;
  c.scale = 0.05F;
  for (const std::int64_t qk_dim : {512, 576}) {
    c.qk_dim = qk_dim;
    const harness::SparseAttentionWork work(c, {.device = kDevice}, 1);
    const Values d_kv_before = work.d_kv.download();
    const Values d_sink_before = work.d_sink.download();
    run(work.forward, {.backend = Backend::cuda});
    Values d_kv, d_sink;
    for (int run = 0; run < 100; ++run) {
      work.d_kv.upload(d_kv_before);
      work.d_sink.upload(d_sink_before);
      winnow::run(work.backward, {.backend = Backend::cuda, .deterministic = true});
      if (run == 0) {
        d_kv = work.d_kv.download();
        d_sink = work.d_sink.download();
      }
      ASSERT_TRUE(same_bits(work.d_kv.download(), d_kv)) << "run " << run;
      ASSERT_TRUE(same_bits(work.d_sink.download(), d_sink)) << "run " << run;
    }
  }
}

/// Bytes of device memory in use.
std::size_t bytes_in_use() {
  std::size_t free = 0;
  std::size_t total = 0;
  EXPECT_EQ(cudaMemGetInfo(&free, &total), cudaSuccess);
  return total - free;
}

// So many queries and keys that a dense score matrix would take 64 GiB.
TEST_F(OnCuda, SelectionOfManyRowsTakesNoMoreThanTheLimit) {
  constexpr std::int64_t kRows = 131072;
  harness::Case c = harness::find_case("glm-5.2");
  c.tokens = kRows;
  c.rows = kRows;
  c.index_heads = 1;
  const harness::IndexTopkWork work(c, {.device = kDevice}, 1);
  const Execution execution{.backend = Backend::cuda};
  EXPECT_LE(workspace_bytes(work.forward, execution), execution.workspace_limit);

  // Memory that the call allocates comes from the device's pool, which counts it.
  cudaMemPool_t pool = nullptr;
  ASSERT_EQ(cudaDeviceGetDefaultMemPool(&pool, kDevice.index), cudaSuccess);
  std::uint64_t reset = 0;
  ASSERT_EQ(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrUsedMemHigh, &reset), cudaSuccess);
  const std::size_t before = bytes_in_use();
  run(work.forward, execution);
  const std::size_t during = bytes_in_use();  // the call may still be running
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  std::uint64_t most = 0;
  ASSERT_EQ(cudaMemPoolGetAttribute(pool, cudaMemPoolAttrUsedMemHigh, &most), cudaSuccess);
  EXPECT_GT(most, 0U);
  EXPECT_LE(most, execution.workspace_limit);
  constexpr std::size_t kSlack = 64 << 20;  // granularity of the pool, and code that is loaded
  EXPECT_LE(during, before + execution.workspace_limit + kSlack);

  // The last row sees all keys.
  const Ints lengths = work.lengths.download_ints(harness::Rows{0, kRows - 1});
  EXPECT_EQ(lengths[0], 1);
  EXPECT_EQ(lengths[1], c.index_topk());
}

}  // namespace
}  // namespace winnow::tests
