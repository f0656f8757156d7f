// SPDX-License-Identifier: Apache-2.0
// Attention on a GPU in a loop over batches of one shape: on a stream of the caller, with a
// workspace that is allocated once, captured into a CUDA graph that is launched with new inputs.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <vector>

#include <cuda_runtime_api.h>

#include "winnow/winnow.h"

namespace {

constexpr int kTokens = 64, kHeads = 16, kDim = 128, kTopk = 32;
constexpr winnow::Device kDevice{winnow::DeviceKind::cuda, 0};

void check(cudaError_t result) {
  if (result != cudaSuccess) throw std::runtime_error(cudaGetErrorString(result));
}

/// Device memory that ends with the program, as all here does.
template <class T>
T* on_gpu(const std::vector<T>& values) {
  T* memory = nullptr;
  check(cudaMalloc(reinterpret_cast<void**>(&memory), values.size() * sizeof(T)));
  check(cudaMemcpy(memory, values.data(), values.size() * sizeof(T), cudaMemcpyDefault));
  return memory;
}

/// The largest difference of out from the mean of the selected keys, to which equal logits lead in
/// every row and head. NaN counts as infinite.
float error_of(const std::vector<float>& out, const std::vector<float>& kv) {
  float largest = 0;
  for (int d = 0; d < kDim; ++d) {
    float mean = 0;
    for (int s = 0; s < kTopk; ++s) mean += kv[s * kDim + d] / kTopk;
    for (int line = 0; line < kTokens * kHeads; ++line) {
      const float error = std::abs(out[line * kDim + d] - mean);
      largest = std::max(largest, std::isnan(error) ? INFINITY : error);
    }
  }
  return largest;
}

int run() {
  // q is 0, so that every row attends to its keys, the first kTopk, alike.
  std::vector<float> q(kTokens * kHeads * kDim), kv(kTokens * kDim), out(q.size());
  std::vector<std::int32_t> indices(kTokens * kTopk);
  for (std::size_t i = 0; i < indices.size(); ++i) indices[i] = static_cast<int>(i % kTopk);
  float* const keys = on_gpu(kv);
  float* const result = on_gpu(out);
  std::vector<float> lse(kTokens * kHeads);

  using winnow::DType, winnow::tensor;
  const winnow::SparseAttentionForward attention = {
      .q = tensor(on_gpu(q), DType::f32, {kTokens, kHeads, kDim}, kDevice),
      .kv = tensor(keys, DType::f32, {kTokens, kDim}, kDevice),
      .indices = tensor(on_gpu(indices), DType::i32, {kTokens, kTopk}, kDevice),
      .out = tensor(result, DType::f32, {kTokens, kHeads, kDim}, kDevice),
      .lse = tensor(on_gpu(lse), DType::f32, {kTokens, kHeads}, kDevice)};

  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  winnow::Execution execution = {.stream = stream};
  execution.workspace_bytes = winnow::workspace_bytes(attention, execution);
  if (execution.workspace_bytes > 0)
    check(cudaMalloc(&execution.workspace, execution.workspace_bytes));

  cudaGraph_t graph = nullptr;
  cudaGraphExec_t replay = nullptr;
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  winnow::sparse_attention_forward(attention, execution);  // enqueues and returns
  check(cudaStreamEndCapture(stream, &graph));
  check(cudaGraphInstantiate(&replay, graph, 0));

  float error = 0;
  for (int launch = 1; launch <= 3; ++launch) {
    for (std::size_t i = 0; i < kv.size(); ++i)
      kv[i] = std::sin(0.3f * static_cast<float>(launch) * static_cast<float>(i));
    check(cudaMemcpyAsync(keys, kv.data(), kv.size() * sizeof(float), cudaMemcpyDefault, stream));
    check(cudaGraphLaunch(replay, stream));
    check(
        cudaMemcpyAsync(out.data(), result, out.size() * sizeof(float), cudaMemcpyDefault, stream));
    check(cudaStreamSynchronize(stream));
    error = std::max(error, error_of(out, kv));
  }
  std::printf("%s: three launches of a graph, workspace %zu bytes, largest error %.1e\n",
              winnow::describe(winnow::Backend::cuda).c_str(), execution.workspace_bytes, error);
  return error < 1e-5f ? 0 : 1;
}

}  // namespace

int main() {
  if (const std::string reason = winnow::why_not(winnow::Backend::cuda); !reason.empty()) {
    std::printf("no GPU to use: %s\n", reason.c_str());
    return 0;
  }
  try {
    return run();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
