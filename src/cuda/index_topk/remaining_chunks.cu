// SPDX-License-Identifier: Apache-2.0
// The chunks of index_topk after the first ones. Only the device knows how many there are, so that
// a graph has a loop, which the device leaves when the plan has no more rows: where windows are
// short, launches of empty kernels instead would take a third of the call.
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "cuda/index_topk/kernels.h"

namespace winnow::cuda::index_topk {
namespace {

constexpr int kThreads = 512;

/// Moves on to the next chunk, from `first` on, and says whether it has rows. The steps take it for
/// chunk 0: its groups are written to `current`, and their tiles are counted from it on.
__global__ void __launch_bounds__(kThreads)
    index_topk_next_chunk_kernel(const __grid_constant__ Plan plan, int first, bool begins,
                                 std::int32_t* current, cudaGraphConditionalHandle goes_on) {
  const int chunk = begins ? first : current[2] + 1;
  __syncthreads();  // all have read what is written below
  const int group = chunk < plan.chunks ? plan.first_group[chunk] : static_cast<int>(plan.groups);
  const bool has_rows = group < plan.groups;
  if (has_rows) {
    const int end = plan.first_group[chunk + 1];
    for (int i = group + static_cast<int>(threadIdx.x); i <= end; i += kThreads) {
      // The first group was the end of the chunk before.
      const std::int64_t chunks = i == group && !begins ? 1 : chunk;
      plan.first_tile[i] -= chunks * plan.chunk_tiles;
    }
    if (threadIdx.x == 0) {
      current[0] = group;
      current[1] = end;
    }
  }
  if (threadIdx.x > 0) return;
  current[2] = chunk;
  cudaGraphSetConditional(goes_on, has_rows ? 1 : 0);
}

/// Lets this thread make graphs and ask for events while another one captures.
class BesideCaptures {
 public:
  BesideCaptures() { cuda_check(cudaThreadExchangeStreamCaptureMode(&mode_)); }
  ~BesideCaptures() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  BesideCaptures(const BesideCaptures&) = delete;
  BesideCaptures& operator=(const BesideCaptures&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

/// An executable graph: a kernel, then a loop of kernels as long as a condition holds.
struct Loop {
  int device = 0;
  cudaGraph_t graph = nullptr;
  cudaGraphConditionalHandle goes_on{};
  cudaGraph_t body = nullptr;
  std::vector<cudaGraphNode_t> nodes, nodes_of_body;
  cudaGraphExec_t executable = nullptr;
  cudaEvent_t end = nullptr;  // of its last launch

  Loop() = default;
  Loop(const Loop&) = delete;
  Loop& operator=(const Loop&) = delete;
  /// Only where a call failed: it may wait for the device.
  ~Loop() {
    if (executable != nullptr) cudaGraphExecDestroy(executable);
    if (graph != nullptr) cudaGraphDestroy(graph);
    if (end != nullptr) cudaEventDestroy(end);
  }
};

/// Loops that have been made. They are used again and not destroyed, because that would wait for
/// the device; there are as many as were ever launched and had not ended.
class Loops {
 public:
  /// Destroys a loop that was taken and not kept, because its call failed.
  struct Discard {
    void operator()(Loop* loop) const;
  };
  using Taken = std::unique_ptr<Loop, Discard>;

  /// A loop that does not run, or a new one; null if there are too many.
  Taken take(int device) {
    const std::lock_guard lock(mutex_);
    for (std::unique_ptr<Loop>& loop : kept_) {
      if (loop->device != device || !has_ended(*loop)) continue;
      std::swap(loop, kept_.back());
      Taken taken(kept_.back().release());
      kept_.pop_back();
      return taken;
    }
    if (count_ == kMost) return nullptr;
    Taken made(new Loop);
    ++count_;
    made->device = device;
    return made;
  }
  void keep(Taken loop) {
    const std::lock_guard lock(mutex_);
    kept_.emplace_back(loop.release());
  }

 private:
  static bool has_ended(const Loop& loop) {
    const cudaError_t status = cudaEventQuery(loop.end);
    if (status == cudaErrorNotReady) {
      cudaGetLastError();  // that it runs is no error
      return false;
    }
    cuda_check(status);
    return true;
  }

  static constexpr int kMost = 64;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Loop>> kept_;
  int count_ = 0;
};

Loops& loops() {
  static auto* const all = new Loops;  // for ever: the runtime may end before it
  return *all;
}

void Loops::Discard::operator()(Loop* loop) const {
  delete loop;
  const std::lock_guard lock(loops().mutex_);
  --loops().count_;
}

/// Adds the loop behind the last node.
void add_loop(Loop& loop, cudaGraphNode_t last) {
  cudaGraphNodeParams parameters{};
  parameters.type = cudaGraphNodeTypeConditional;
  parameters.conditional.handle = loop.goes_on;
  parameters.conditional.type = cudaGraphCondTypeWhile;
  parameters.conditional.size = 1;
  cudaGraphNode_t node = nullptr;
  cuda_check(cudaGraphAddNode(&node, loop.graph, &last, nullptr, 1, &parameters));
  loop.body = parameters.conditional.phGraph_out[0];
}

bool is_capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status{};
  cuda_check(cudaStreamIsCapturing(stream, &status));
  return status != cudaStreamCaptureStatusNone;
}

}  // namespace

void for_remaining_chunks(const Plan& plan, int first, const ForChunk& scores_of,
                          const ForChunk& select_from, std::int32_t* scratch, Device device,
                          const Execution& execution) {
  // A captured call stays one of kernels alone, which can be a part of any other graph.
  const bool captured = is_capturing(execution.stream);
  const BesideCaptures beside;
  Loops::Taken loop = captured ? nullptr : loops().take(device.index);
  if (loop == nullptr) {
    for (int chunk = first; chunk < plan.chunks; ++chunk) {
      scores_of(plan, chunk, nullptr);
      select_from(plan, chunk, nullptr);
    }
    return;
  }
  const bool is_new = loop->executable == nullptr;
  if (is_new) {
    cuda_check(cudaEventCreateWithFlags(&loop->end, cudaEventDisableTiming));
    cuda_check(cudaGraphCreate(&loop->graph, 0));
    cuda_check(cudaGraphConditionalHandleCreate(&loop->goes_on, loop->graph, 0, 0));
  }
  const Launch one_block{.blocks = 1, .threads = kThreads};
  NodeChain chain(loop->graph, loop->executable, loop->nodes);
  chain.add(index_topk_next_chunk_kernel, one_block, plan, first, true, scratch, loop->goes_on);
  if (is_new) add_loop(*loop, chain.last());
  Plan current = plan;
  current.first_group = scratch;
  current.chunks = 1;
  NodeChain body(loop->body, loop->executable, loop->nodes_of_body);
  scores_of(current, 0, &body);
  select_from(current, 0, &body);
  body.add(index_topk_next_chunk_kernel, one_block, plan, first, false, scratch, loop->goes_on);
  if (is_new) cuda_check(cudaGraphInstantiate(&loop->executable, loop->graph, 0));
  cuda_check(cudaGraphLaunch(loop->executable, execution.stream));
  cuda_check(cudaEventRecord(loop->end, execution.stream));
  loops().keep(std::move(loop));
}

}  // namespace winnow::cuda::index_topk
