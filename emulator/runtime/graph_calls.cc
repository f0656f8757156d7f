// SPDX-License-Identifier: Apache-2.0
// Calls of the runtime on graphs.
#include <memory>

#include "emulator/runtime/capture.h"
#include "emulator/runtime/errors.h"
#include "emulator/runtime/launch.h"

namespace winnow::emulator {
namespace {

/// An instantiated graph is a copy, of which a launch takes one more: later changes do not concern
/// it.
Graph& executable_of(cudaGraphExec_t handle) {
  require(handle != nullptr);
  return *reinterpret_cast<Graph*>(handle);
}

Action action_of(const cudaKernelNodeParams& kernel) {
  require(kernel.extra == nullptr, cudaErrorNotSupported);
  const LaunchShape shape{
      .grid = kernel.gridDim, .block = kernel.blockDim, .shared_bytes = kernel.sharedMemBytes};
  return kernel_action(kernel.func, shape, kernel.kernelParams);
}

}  // namespace
}  // namespace winnow::emulator

using namespace winnow::emulator;

cudaError_t cudaGraphCreate(cudaGraph_t* graph, unsigned flags) {
  return call([&] {
    require(graph != nullptr && flags == 0);
    *graph = handle_of(new Graph);
  });
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  return call([&] { delete &graph_of(graph); });
}

cudaError_t cudaGraphAddKernelNode(cudaGraphNode_t* node, cudaGraph_t graph,
                                   const cudaGraphNode_t* /*before*/, std::size_t /*count*/,
                                   const cudaKernelNodeParams* parameters) {
  return call([&] {
    require(node != nullptr && parameters != nullptr);
    *node = handle_of(&graph_of(graph).add(action_of(*parameters)));
  });
}

/// Adds nodes that repeat their body, and no others.
cudaError_t cudaGraphAddNode(cudaGraphNode_t* node, cudaGraph_t graph,
                             const cudaGraphNode_t* /*before*/, const cudaGraphEdgeData* /*edges*/,
                             std::size_t /*count*/, cudaGraphNodeParams* parameters) {
  return call([&] {
    require(node != nullptr && parameters != nullptr);
    require(parameters->type == cudaGraphNodeTypeConditional, cudaErrorNotSupported);
    cudaConditionalNodeParams& loop = parameters->conditional;
    require(loop.type == cudaGraphCondTypeWhile, cudaErrorNotSupported);
    require(loop.size == 1);
    const std::shared_ptr<Condition> condition = find_condition(loop.handle);
    Node& added = graph_of(graph).add({});
    added.condition = condition;
    added.body = std::make_unique<Graph>();
    added.body_handle = handle_of(added.body.get());
    loop.phGraph_out = &added.body_handle;
    *node = handle_of(&added);
  });
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph,
                                 unsigned long long /*flags*/) {
  return call([&] {
    require(executable != nullptr);
    *executable = reinterpret_cast<cudaGraphExec_t>(graph_of(graph).copy().release());
  });
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  return call([&] { delete &executable_of(executable); });
}

cudaError_t cudaGraphExecKernelNodeSetParams(cudaGraphExec_t executable, cudaGraphNode_t node,
                                             const cudaKernelNodeParams* parameters) {
  return call([&] {
    require(parameters != nullptr);
    Node* const found = executable_of(executable).find(node_of(node).id);
    require(found != nullptr && found->action.is_kernel);
    found->action = action_of(*parameters);
  });
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
  return call([&] {
    const std::shared_ptr<const Graph> graph = executable_of(executable).copy();
    const auto run = [graph] {
      for (const std::shared_ptr<Condition>& condition : graph->conditions)
        if (condition->is_reset) condition->value = condition->at_launch;
      graph->run();
    };
    enqueue(find_stream(stream), {.run = run, .on_host = graph->on_host()});
  });
}
